"""Check that a file can be written, before the work whose result it is to hold; leave no part of a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_file(option: str, path: Path, make_folder: bool = False) -> None:
    """Raise ValueError if no file can be written at `path`.

    option: the command-line option that named the file, such as "--out", for the message. make_folder:
    whether the caller makes a missing folder, and replaces an existing file as a whole.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give the name of a file")
    if path.exists() and not make_folder:  # overwritten in place: its folder need not be writable
        if not os.access(path, os.W_OK):
            raise ValueError(f"{option} {path} may not be written; name another file")
        return
    folder = path.absolute().parent
    if make_folder:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.exists():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it, or name another")
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: {folder} is a file; name a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {path}: {folder} takes no files ({error.strerror}); name another folder"
        ) from None


@contextlib.contextmanager
def whole(path: str | Path) -> Iterator[None]:
    """Remove the new file at `path` if the block that writes it fails, as on a full disk or at Ctrl-C."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file completely or not at all: on a full disk, or at Ctrl-C, the old one is still there.

    A device such as /dev/null, or a file in a folder that takes no new files, is written in place. Raises
    OSError, which names the file.
    """
    place = path.resolve()  # a link stays a link
    try:
        if place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK)):
            place.write_text(text, encoding="utf-8")
            return
        new = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        with whole(new):
            new.write_text(text, encoding="utf-8")
            if place.exists():
                shutil.copymode(place, new)
            os.replace(new, place)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
