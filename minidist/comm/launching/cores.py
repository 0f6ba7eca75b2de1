"""The cores and the memory that this process may use.

A container's limits are those of a control group. Version 2 has one tree of groups, version 1 one for each
controller. A limit holds for all groups below it, so this process's group and those above it are read. A
container may be told the path that its group has on the host, where it finds nothing; its own group is then
the root.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

ROOT, OWN = "/sys/fs/cgroup", "/proc/self/cgroup"


def available_cores() -> int:
    """Return the cores that this process may use, by its CPU affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(allowed, math.ceil(quota))) if quota else allowed


def cpu_quota(root: str = ROOT, own: str = OWN) -> float | None:
    """Return the cores' worth of time that the control groups allow; None for no limit."""
    found = []
    for group in _groups("cpu", root, own):
        with contextlib.suppress(OSError, ValueError):  # "max" for no limit
            quota, period = map(int, (group / "cpu.max").read_text().split())
            found.append(quota / period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            found += [quota / period] if quota > 0 else []  # -1 for no limit
    return min(found, default=None)


def memory_limit(root: str = ROOT, own: str = OWN) -> int | None:
    """Return the bytes of memory that the control groups allow; None for no limit."""
    found = []
    for group in _groups("memory", root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((group / name).read_text()))
    return min(found, default=None)


def _groups(controller: str, root: str, own: str) -> list[Path]:
    """The folders that may limit this process: from the roots down to its own group, in both versions."""
    found = [Path(root), Path(root, controller)]
    with contextlib.suppress(OSError):
        for line in Path(own).read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            group = found[1] if controllers else found[0]
            for part in path.strip("/").split("/"):
                group = group / part
                found.append(group)
    return found
