"""Checkpoints in a folder: their names, their order, and how one gets its name in one step.

POSIX's rename is atomic. It survives a power failure once the files, their directory and the directory above
have been synced. If the name is taken, the new directory and the old one exchange names in one step (Linux's
renameat2), and then the old one is removed. Where that is impossible, the old one is called `.old.writing`
for a moment; if the program ends then, that name still counts as the checkpoint's.

The newest checkpoint of a folder is the one that was saved last, whatever its step: a training that goes back
to an earlier step and saves from there has abandoned the later ones. So each save has a number, in its index.
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
"""How the name of a directory ends that is being written or removed; it is never a checkpoint."""
_OLD = ".old" + WRITING
_STEP = r"step-(\d{8,})(\.old\.writing)?"
_LEFT = r"step-\d{8,}(\.old)?(\.writing)+"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def step_name(step: int) -> str:
    """Return a checkpoint's name in its folder, such as step-00000100."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of one of a folder's `checkpoints`."""
    found = re.fullmatch(_STEP, path.name)
    assert found is not None, path
    return int(found[1])


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, the last saved first; none if there is no folder.

    One whose index does not say when it was saved comes before the first one of an earlier step.
    """
    folder = Path(folder)
    names = sorted(os.listdir(folder), reverse=True) if folder.is_dir() else []  # "x" after "x.old.writing"
    steps = {int(found[1]): folder / name for name in names if (found := re.fullmatch(_STEP, name))}
    numbers = {step: save_number(path) for step, path in steps.items()}
    order = sorted(
        (step for step in steps if numbers[step] is not None),
        key=lambda step: (numbers[step], step),
        reverse=True,
    )
    for step in sorted(step for step in steps if numbers[step] is None):
        earlier = next((i for i, other in enumerate(order) if other < step), len(order))
        order.insert(earlier, step)
    return [steps[step] for step in order]


def newest_whole(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint of a folder that was saved last, of those that seem whole; None if none does."""
    return next(filter(seems_whole, checkpoints(folder)), None)


def next_number(folder: Path) -> int:
    """Return the number of the next save into a folder, above all numbers there."""
    return 1 + max((save_number(path) or 0 for path in checkpoints(folder)), default=0)


def standing(path: Path) -> Path:
    """Return where the checkpoint called `path` is: under its old name if a replacement was cut short."""
    old = path.with_name(path.name + _OLD)
    return old if old.is_dir() and not os.path.lexists(path) else path


def is_checkpoint(path: Path) -> bool:
    """Whether a path holds a checkpoint, or is a folder's step-N with the remains of one."""
    if (path / INDEX).is_file():
        return True
    if not path.is_dir() or not re.fullmatch(_STEP, path.name):
        return False
    return all(re.fullmatch(FILE, name) for name in os.listdir(path))


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and sync their names to the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


def written_aside(path: Path) -> Path:
    """Return where a file or checkpoint is written before it is renamed to `path`: next to it."""
    return path.with_name(path.name + WRITING)


def put_in_place(aside: Path, path: Path) -> None:
    """Give a complete directory its name, and remove what had the name before."""
    sync_directory(aside)
    if not os.path.lexists(path):
        os.rename(aside, path)
    elif not exchange(aside, path):  # for a moment nothing has the name, and `aside` is whole
        old = path.with_name(path.name + _OLD)
        discard(old)
        os.rename(path, old)
        os.rename(aside, path)
        shutil.rmtree(old, ignore_errors=True)
    sync_directory(path.parent)
    discard(aside)


def keep_newest(folder: Path, keep: int) -> None:
    """Keep the `keep` whole checkpoints of a folder that were saved last; remove older ones and leftovers.

    A damaged checkpoint does not count; it goes once that many whole ones are newer.
    """
    others = checkpoints(folder)
    while keep and others:
        keep -= seems_whole(others.pop(0))
    for path in others:
        doomed = written_aside(path)  # a half-removed one must not look like a checkpoint
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
        discard(doomed)
    for name in os.listdir(folder):
        needed = name.endswith(_OLD) and standing(folder / name.removesuffix(_OLD)).name == name
        if re.fullmatch(_LEFT, name) and not needed and not being_written(folder / name):
            discard(folder / name)


def begin_writing(directory: Path) -> int:
    """Make an empty directory and lock it. Returns the lock's descriptor.

    The system releases the lock when this process ends, so a killed save does not keep it.
    """
    directory.mkdir()
    descriptor = os.open(directory, os.O_RDONLY)
    take_lock(descriptor)
    return descriptor


def take_lock(descriptor: int) -> bool:
    """Lock an open file or directory; False if it is locked. True, too, if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def being_written(directory: Path) -> bool:
    """Whether a save of this or another process is writing to a directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not take_lock(descriptor)
    finally:
        os.close(descriptor)


def end_writing(descriptor: int) -> None:
    """Release the lock of `begin_writing`, even if a fork of this process has its descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def discard(directory: Path) -> None:
    """Remove a directory that is no checkpoint, as far as possible."""
    shutil.rmtree(directory, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    if rename is None:
        return False
    first, second = os.fsencode(one), os.fsencode(other)
    return bool(rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0)
