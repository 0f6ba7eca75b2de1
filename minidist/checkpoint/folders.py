"""Where checkpoints lie: their names in a folder, and how one takes its place at once or not at all.

POSIX's rename is atomic, and lasts a power failure once the files, their directory and the directory above
have been synced. A directory that stands already is exchanged with the new one in one step (Linux's
renameat2), and only then removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sys
from pathlib import Path

WRITING = ".writing"
"""The end of the name of a directory that is being written, or removed: never a checkpoint."""
_STEP = re.compile(r"step-(\d{8,})")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def step_name(step: int) -> str:
    """A checkpoint's name in its folder: step-00000100."""
    return f"step-{step:08d}"


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, whole or not, the newest step first; none where there is no folder."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    steps = {int(found[1]): folder / name for name in names if (found := _STEP.fullmatch(name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def written_aside(path: Path) -> Path:
    """Where a checkpoint is written before it is called `path`: in the same directory, so on its disk."""
    return path.with_name(path.name + WRITING)


def put_in_place(aside: Path, path: Path) -> None:
    """Give a complete directory its name; what had it before is removed."""
    sync_directory(aside)
    if not os.path.lexists(path):
        os.rename(aside, path)
    elif not _exchange(aside, path):  # for a moment neither has the name, and `aside` is whole
        old = path.with_name(path.name + ".old" + WRITING)
        os.rename(path, old)
        os.rename(aside, path)
        shutil.rmtree(old, ignore_errors=True)
    sync_directory(path.parent)
    discard(aside)


def keep_newest(folder: Path, keep: int, newest: Path) -> None:
    """Remove all checkpoints of a folder but `newest` and those next to it, `keep` in all; and leftovers."""
    others = [path for path in checkpoints(folder) if path != newest]
    for path in others[keep - 1 :]:
        doomed = written_aside(path)  # a removal that is cut short must not look like a checkpoint
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
        discard(doomed)
    for name in os.listdir(folder):
        if name.endswith(WRITING):
            discard(folder / name)


def discard(directory: Path) -> None:
    """Remove a directory that is no checkpoint, as far as that is possible."""
    shutil.rmtree(directory, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Have the names in a directory reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    if rename is None:
        return False
    names = (ctypes.c_char_p(os.fsencode(path)) for path in (one, other))
    first, second = names
    return bool(rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0)
