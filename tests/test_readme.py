"""Each block of code in the READMEs and in docs/ runs as a script of its own, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import warm_python

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "lessons/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}", marks=[pytest.mark.deep] if "docs" in page.parts else [])
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
LIMIT = 240  # seconds of a block, on a machine that is busy with other things, too

# One process runs them all, since importing torch, twice, is most of what a script costs.
PYTHON = """
import contextlib, runpy, sys, traceback
for line in sys.stdin:
    script, out = line.split()
    with open(out, "w") as file, contextlib.redirect_stdout(file):
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc()
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Path], tuple[str, str]]]:
    """`run(script)`: what it writes to its standard output, and to that of errors, its ranks' too."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        warm_python.Popen(
            [sys.executable, "-c", PYTHON],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin
        assert process.stdout
        requests, answers = process.stdin, process.stdout

        def each(script: Path) -> tuple[str, str]:
            out = script.with_suffix(".out")
            print(script, out, file=requests, flush=True)
            late = threading.Timer(LIMIT, process.kill)
            late.start()
            answer = answers.readline()
            late.cancel()
            errors.seek(0)
            said = errors.read()
            errors.seek(0)
            errors.truncate()
            assert answer == "done\n", f"took more than {LIMIT} s, or ended the process; {said}"
            return out.read_text(), said

        yield each


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str, tmp_path: Path, run: Callable[[Path], tuple[str, str]]) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    out, errors = run(script)
    assert errors == ""
    for shown in re.findall(r"print\(.*# (.*)", block):
        assert shown in out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        to = page.parent / link if link else page
        assert to.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)", to.read_text().lower(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", each).replace(" ", "-") for each in headings]
            assert anchor in anchors, link


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 120
