"""Which processes there are, for tests that signal some of them, and want none left."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.helpers.clocks import until


def alive(process: int) -> bool:
    """True where a process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(processes: list[int]) -> None:
    assert until(lambda: not any(map(alive, processes))), f"of processes {processes} some are still running"


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
