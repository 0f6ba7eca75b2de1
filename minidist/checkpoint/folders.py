"""Where checkpoints lie: their names in a folder, and how one takes its place at once or not at all.

POSIX's rename is atomic, and lasts a power failure once the files, their directory and the directory above
have been synced. A directory that stands already is exchanged with the new one in one step (Linux's
renameat2), and only then removed. Where that cannot be done it is called `.old.writing` for a moment; should
the program end in it, that name still is the checkpoint's.

In a folder the newest checkpoint is the one that was saved last, whatever its step: who goes back to an
earlier step and saves from there on has left the later ones behind. Each save has a number, in its index.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import sys
from pathlib import Path

from minidist.checkpoint.index import FILE, INDEX, save_number, seems_whole

WRITING = ".writing"
"""The end of the name of a directory that is being written, or removed: never a checkpoint."""
_OLD = ".old" + WRITING
_STEP = re.compile(r"step-(\d{8,})(\.old\.writing)?")
_LEFT = re.compile(r"step-\d{8,}(\.old)?(\.writing)+")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def step_name(step: int) -> str:
    """A checkpoint's name in its folder: step-00000100."""
    return f"step-{step:08d}"


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, whole or not, the one saved last first; none where there is no folder.

    One whose index does not tell when it was saved comes before the first one of an earlier step.
    """
    folder = Path(folder)
    names = sorted(os.listdir(folder), reverse=True) if folder.is_dir() else []  # "x" after "x.old.writing"
    steps = {int(found[1]): folder / name for name in names if (found := _STEP.fullmatch(name))}
    numbers = {step: save_number(path) for step, path in steps.items()}
    order = sorted(
        (step for step in steps if numbers[step] is not None),
        key=lambda step: (numbers[step], step),
        reverse=True,
    )
    for step in sorted(step for step in steps if numbers[step] is None):
        place = next((place for place, other in enumerate(order) if other < step), len(order))
        order.insert(place, step)
    return [steps[step] for step in order]


def next_number(folder: Path) -> int:
    """The number of the next save into a folder: above all that are there."""
    return 1 + max((save_number(path) or 0 for path in checkpoints(folder)), default=0)


def standing(path: Path) -> Path:
    """Where the checkpoint called `path` is: at another name where an exchange with a newer was cut short."""
    old = path.with_name(path.name + _OLD)
    return old if old.is_dir() and not os.path.lexists(path) else path


def is_checkpoint(path: Path) -> bool:
    """Whether a path holds a checkpoint, or in a folder's step-N what is left of one."""
    if (path / INDEX).is_file():
        return True
    if not path.is_dir() or not _STEP.fullmatch(path.name):
        return False
    return all(FILE.fullmatch(name) for name in os.listdir(path))


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, and have their names reach the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


def written_aside(path: Path) -> Path:
    """Where a checkpoint is written before it is called `path`: in the same directory, so on its disk."""
    return path.with_name(path.name + WRITING)


def put_in_place(aside: Path, path: Path) -> None:
    """Give a complete directory its name; what had it before is removed."""
    sync_directory(aside)
    if not os.path.lexists(path):
        os.rename(aside, path)
    elif not _exchange(aside, path):  # for a moment neither has the name, and `aside` is whole
        old = path.with_name(path.name + _OLD)
        discard(old)
        os.rename(path, old)
        os.rename(aside, path)
        shutil.rmtree(old, ignore_errors=True)
    sync_directory(path.parent)
    discard(aside)


def keep_newest(folder: Path, keep: int) -> None:
    """Remove what comes behind the `keep` whole checkpoints of a folder that were saved last; and leftovers.

    A damaged one counts for none: it goes when so many whole ones are before it.
    """
    others = checkpoints(folder)
    while keep and others:
        keep -= seems_whole(others.pop(0))
    for path in others:
        doomed = written_aside(path)  # a removal that is cut short must not look like a checkpoint
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
        discard(doomed)
    for name in os.listdir(folder):
        needed = name.endswith(_OLD) and standing(folder / name.removesuffix(_OLD)).name == name
        if _LEFT.fullmatch(name) and not needed and not being_written(folder / name):
            discard(folder / name)


def begin_writing(directory: Path) -> int:
    """Make an empty directory, and lock it; the lock's descriptor.

    The system lets go of it when this process ends, so that what a killed save left is no other's.
    """
    directory.mkdir()
    descriptor = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def being_written(directory: Path) -> bool:
    """Whether a save that is under way, of this process or another, writes to a directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def end_writing(descriptor: int) -> None:
    """Let go of what `begin_writing` locked, also where a fork of this process has the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


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
