"""Programs in a Python of their own: what they import, compile, fork or set concerns no other test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.clocks import HANG


def output_of(code: str, *arguments: str, folder: Path | None = None, **variables: str) -> str:
    """What the program prints, with these environment variables besides ours; its errors where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
