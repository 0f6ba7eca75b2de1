"""The user's cache folder, which keeps measured peaks and compiled kernels, and how its files are written."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder, which may not exist yet: $MINIDIST_CACHE_DIR, or the system's place for caches."""
    named = os.environ.get("MINIDIST_CACHE_DIR")
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir()) / "minidist"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "minidist"
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (xdg if xdg.is_absolute() else home / ".cache") / "minidist"  # the XDG rules: relative is ignored


def write_whole(file: Path, content: bytes) -> bool:
    """Write the file elsewhere and rename it, so nobody reads a part; return whether that succeeded."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        return False
    return True
