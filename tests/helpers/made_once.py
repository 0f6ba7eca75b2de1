"""Make once in a run of tests what each of its processes needs, such as the site or a wheel."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder that `make(folder)` fills; the first process makes it, and the others wait."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # that of all processes
    folder, begun = shared / name, shared / f"{name}.begun"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(begun, ignore_errors=True)  # of a process that failed
            begun.mkdir()
            make(begun)
            begun.rename(folder)
    return folder
