"""Keep a machine's peaks in the user's cache folder, so that they are measured once.

The file's name holds what the peaks depend on: the CPU, how many of its cores the process may use, the vector
unit, the GPU. So several machines can share a home folder, with a file for each.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from ..cache_folder import cache_folder, write_whole
from ..cpu.support.caches import available_cpus
from ..cpu.support.vector_unit import vector_unit
from ..tried_once import cpu_fields
from .peaks import Peaks

FORMAT = 2  # of the file; with another format the peaks are measured again


def path() -> Path:
    """Return the file of this machine."""
    unit = vector_unit().name
    words = f"{cpu_name()} {len(available_cpus())} cores {unit} {' '.join(gpu_names())}"
    return cache_folder() / f"roofline-{re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-')}.json"


def load(file: Path) -> Peaks | None:
    """Return the peaks in the file; None if there is no such file, or it can't be used."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        peaks = Peaks.from_dict(kept["peaks"]) if kept["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    here = (cpu_name(), len(available_cpus()), vector_unit().name)
    return peaks if peaks and (peaks.machine, peaks.cores, peaks.vector_unit) == here else None


def save(peaks: Peaks, file: Path) -> bool:
    """Write the file, whole or not at all, and return whether that succeeded."""
    text = json.dumps({"format": FORMAT, "peaks": asdict(peaks)}, indent=1)
    return write_whole(file, text.encode())


def cpu_name(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the CPU's name; without one, as on ARM under Linux, its architecture and part number."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(asked, capture_output=True, text=True, timeout=5).stdout.strip()
            if name:
                return name
    fields = cpu_fields(cpuinfo)
    if fields.get("model name"):
        return " ".join(fields["model name"].split())
    part = [fields[key] for key in ("CPU implementer", "CPU part") if key in fields]
    return " ".join([platform.machine() or "unknown CPU", *part])


def gpu_names(root: str = "/proc/driver/nvidia/gpus") -> list[str]:
    """Return the names of NVIDIA's GPUs, each once. The driver's files tell; asking torch takes a second."""
    names = set()
    for file in Path(root).glob("*/information"):
        with contextlib.suppress(OSError):
            names |= set(re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE))
    return sorted(names)
