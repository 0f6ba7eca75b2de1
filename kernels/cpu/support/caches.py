"""The sizes of this machine's data caches, as the operating system reports them.

A block has to fit the cache from which it is used again, and an array meant to come from main memory must not
fit any. Linux describes the caches of each CPU in sysfs, macOS in sysctl. A size that neither reports is
assumed small: 32 KiB of L1, 512 KiB of L2, no L3.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")
# With two kinds of cores, "perflevel0" names the fast ones and the plain names mean the slow ones.
SYSCTL_NAMES = {
    "l1_data": ("hw.perflevel0.l1dcachesize", "hw.l1dcachesize"),
    "l2": ("hw.perflevel0.l2cachesize", "hw.l2cachesize"),
    "l3": ("hw.perflevel0.l3cachesize", "hw.l3cachesize"),
}
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Caches:
    """Bytes of the caches that hold data."""

    l1_data: int = 32 * 2**10  # of one core
    l2: int = 512 * 2**10  # of one core, or of the few that share it
    l3: int = 0  # of the one that a core reaches and shares with others; 0 if there is none
    l3_total: int = 0  # of all L3s that this process's cores reach; a CPU of several chips has several


def available_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@functools.cache
def caches() -> Caches:
    """Return the sizes of this machine's caches; the defaults if the system does not report them."""
    try:
        if sys.platform == "darwin":
            names = [name for each in SYSCTL_NAMES.values() for name in each]
            done = subprocess.run(["sysctl", *names], capture_output=True, text=True, timeout=5)
            return from_sysctl(done.stdout)
        return from_sysfs(SYSFS, available_cpus())
    except (OSError, ValueError, subprocess.SubprocessError):
        return Caches()


def from_sysfs(root: Path, cpus: Iterable[int]) -> Caches:
    """Return the sizes in the files `cpu*/cache/index*/{level,type,size,shared_cpu_list}` below `root`.

    L1 and L2 are those of the first of `cpus`. CPUs that share an L3 with one already seen are skipped, so a
    machine with hundreds of CPUs is read as fast as a small one.
    """
    sizes: dict[str, int] = {}
    l3_total = 0
    seen: set[int] = set()
    for cpu in cpus:
        if cpu in seen:
            continue
        seen.add(cpu)
        for index in sorted((root / f"cpu{cpu}" / "cache").glob("index*")):
            try:
                level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
                bytes_ = _bytes(size)
                shared = _cpu_list((index / "shared_cpu_list").read_text())
            except (OSError, ValueError):  # virtual machines lack some of the files
                continue
            name = {"1": "l1_data", "2": "l2", "3": "l3"}.get(level)
            if name is None or kind == "Instruction" or bytes_ == 0:
                continue
            sizes.setdefault(name, bytes_)
            if name == "l3":
                l3_total += bytes_
                seen |= shared
        if not l3_total:
            break  # without an L3, the others have nothing to add
    return Caches(**sizes, l3_total=l3_total)


def from_sysctl(text: str) -> Caches:
    """Return the sizes in the output of macOS's `sysctl`, lines such as "hw.l2cachesize: 4194304"."""
    said = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip().isdigit() and int(value) > 0:
            said[name.strip()] = int(value)
    sizes = {
        field: next(said[name] for name in names if name in said)
        for field, names in SYSCTL_NAMES.items()
        if any(name in said for name in names)
    }
    return Caches(**sizes, l3_total=sizes.get("l3", 0))


def _bytes(size: str) -> int:
    """Return the bytes of "32K"."""
    return int(size[:-1]) * UNITS[size[-1]] if size[-1:] in UNITS else int(size)


def _cpu_list(text: str) -> set[int]:
    """Return the numbers in "0-3,8"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
