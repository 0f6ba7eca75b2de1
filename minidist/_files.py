"""Check that a file can be written, before the work whose result it is to hold; leave no part of a file."""

from __future__ import annotations

import contextlib
import os
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
