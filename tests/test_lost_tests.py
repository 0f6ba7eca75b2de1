"""Workers of pytest that die take no test with them unsaid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.clocks import HANG

ROOT = Path(__file__).parents[1]
DIES = "import os, signal, pytest\n@pytest.mark.parametrize('i', range(30))\ndef test_it(i):\n"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("body", "words", "fails", "lost"),
    [
        # Both workers die: a live one takes over what the other leaves, if it is quick.
        (f"{KILL} if i in (3, 20) else None", ["--max-worker-restart", "0"], True, True),
        # A new worker runs the rest.
        pytest.param(f"{KILL} if i == 3 else None", [], True, False, marks=pytest.mark.deep),
        # `make test` itself is a run in which no test is lost, and many are deselected.
        pytest.param("assert i < 3", ["-x"], True, False, marks=pytest.mark.deep),
        pytest.param(
            *("pass", ["-k", "3", "--deselect", "test_some.py::test_it[13]"], False, False),
            marks=pytest.mark.deep,
        ),
    ],
)
def test_tests_that_a_dead_worker_leaves_are_told(
    tmp_path: Path, body: str, words: list[str], fails: bool, lost: bool
) -> None:
    (tmp_path / "test_some.py").write_text(f"{DIES}    {body}\n")
    plugins = ["-p", "xdist", "-p", "tests.helpers.lost_tests", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-n2", "--dist=worksteal", *plugins, f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    told = "tests were collected and never reported" in done.stdout
    assert (bool(done.returncode), told) == (fails, lost), done.stdout + done.stderr
    if lost:
        *_, counts, said = re.split(r"\n(?=.*failed, )|\n(?=\d+ of 30 tests)", done.stdout)
        left = 30 - sum(map(int, re.findall(r"(\d+) (?:failed|passed)", counts)))
        first, *named = said.splitlines()
        assert first == f"{left} of 30 tests were collected and never reported:"
        assert all(line.startswith("test_some.py::test_it[") for line in named[:10])
        assert named[10:] == [f"... and {left - 10} more"] * (left > 10)
