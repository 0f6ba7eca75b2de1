"""Whether a file can be written, asked before the work that is to fill it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check_file(option: str, path: Path, make_folder: bool = False) -> None:
    """Raise where no file can be written at `path`.

    Args:
        option: what the user gave it with, such as "--out".
        make_folder: whether its folder is made where there is none, and a file that is there replaced whole.

    Raises:
        ValueError: it is a folder, or has none, or one that takes no files; or it may not be written over.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give the name of a file")
    if path.exists() and not make_folder:  # it is written in place, also where its folder takes no other
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
