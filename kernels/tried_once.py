"""Find out by trying in a child process what this machine's CPU can do, once, and remember the answer.

A CPU's flags may promise what the machine does not keep: a hypervisor hides parts of CPUID, or the system
refuses a register. A program that believes them dies. So a child process tries, and the user's cache folder
keeps the answer for this CPU, its microcode and whatever else it depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .cache_folder import cache_folder

# Others, such as SIGKILL when memory runs out, come from outside and say nothing about the CPU.
FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)
CPU_FIELDS = ("model name", "cpu family", "model", "stepping", "microcode", "flags", "CPU part", "Features")


def child(
    program: str, environment: Mapping[str, str], limit: float
) -> subprocess.CompletedProcess[bytes] | None:
    """Run a Python program in a child process, at most `limit` seconds; None if it took longer.

    `{!r}` in it stands for this process's `sys.path`.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        return subprocess.run(
            [sys.executable, "-c", program.format(path)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def fault(status: int) -> str:
    """Return the fault that ended a process with this status, such as "SIGILL"; "" if another thing did."""
    return signal.Signals(-status).name if -status in FAULTS else ""


def remembered(name: str, builds: tuple[str, ...], find: Callable[[], Any]) -> Any:
    """Return the kept answer to the question `name`, or else what `find` returns now; None is not kept.

    `builds` are the versions of the software that the answer depends on.
    """
    file = cache_folder() / f"{name}-{_identity(builds)}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text())
    try:
        import fcntl

        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a+b", buffering=0)
    except (ImportError, OSError):
        return find()
    with opened:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)  # ranks ask at the same time, and the first tries for all
        opened.seek(0)
        with contextlib.suppress(ValueError):
            return json.loads(opened.read())
        found = find()
        if found is not None:
            with contextlib.suppress(OSError):  # the disk is full: it is found anew next time
                opened.truncate(0)
                opened.write(json.dumps(found).encode())
        return found


def cpu_fields(cpuinfo: str = "/proc/cpuinfo") -> dict[str, str]:
    """Return what Linux says of the first CPU, which speaks for all; nothing if nothing tells."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), Path(cpuinfo).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, separator, value = line.partition(":")
            if not separator:
                break
            fields[key.strip()] = value.strip()
    return fields


def _identity(builds: tuple[str, ...]) -> str:
    """Letters and digits for the CPU, its microcode and these builds."""
    told = [platform.machine(), platform.processor()]
    told += [value for key, value in cpu_fields().items() if key in CPU_FIELDS]
    return hashlib.sha256("\n".join([*told, *builds]).encode()).hexdigest()[:16]
