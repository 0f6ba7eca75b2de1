"""Which processes there are, for tests that signal some of them, and want none left."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def alive(process: int) -> bool:
    """True where a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(processes: list[int], limit: float = 5.0) -> None:
    deadline = time.monotonic() + limit
    while (left := [p for p in processes if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"processes {left} are still running after {limit} s"


def descendants(process: int) -> list[int]:
    """Processes below this one, itself excluded."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = list(children.get(process, []))
    for child in found:
        found.extend(children.get(child, []))
    return found
