"""Scripts in processes of their own, alone or under torchrun, forked from an interpreter that has torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.helpers import warm_python
from tests.helpers.clocks import HANG


def run_script(folder: Path, text: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; `words` are its arguments. It is in FOLDER/program.py."""
    return _run([str(written(folder, text)), *words], environment)


def run_as_users_do(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        env={**os.environ, **environment},
    )


def torchrun(
    folder: Path, text: str, *options: str, children: str = "2", without: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks. children: processes that torchrun starts. without: a variable to unset."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    return _run([*words, str(written(folder, text))], {warm_python.CHILDREN: children}, without)


def written(folder: Path, text: str) -> Path:
    """Write a script, whose text may be indented."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(text))
    return script


def _run(
    words: list[str], environment: dict[str, str], without: str = ""
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != without}
    done: subprocess.CompletedProcess[str] = warm_python.run(
        [sys.executable, *words], timeout=HANG, env={**kept, "OMP_NUM_THREADS": "1", **environment}
    )
    return done
