"""Count the cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cores() -> int:
    """Return the cores that this process may use, by its CPU affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(allowed, math.ceil(quota))) if quota else allowed


def cpu_quota(path: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """Return the cores' worth of time that the control group (version 2) allows; None for no limit."""
    try:
        quota, period = Path(path).read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
