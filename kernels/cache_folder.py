"""The user's cache folder, which keeps measured peaks and compiled kernels."""

from __future__ import annotations

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
