"""`minidist lessons`: how far a reader has come, and JupyterLab in the folder of the lessons.

What has passed is in lessons/.progress.json, which the lessons' checks write; deleting it begins anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

STOP_TIMEOUT = 10.0
"""Seconds that JupyterLab gets to end after Ctrl-C."""


@dataclass(frozen=True)
class Lesson:
    """A lesson as its file has it."""

    number: int
    title: str
    exercises: tuple[str, ...]  # names, in order
    passed: tuple[str, ...]  # of these
    seconds: float | None  # from top to bottom, as recorded


def folder() -> Path:
    """The folder of the lessons: of this checkout, or below the current directory.

    Raises:
        ValueError: there is none.
    """
    here = Path.cwd()
    for place in (Path(__file__).resolve().parents[2] / "lessons", here / "lessons", here):
        if (place / "checks" / "exercises.py").exists():
            return place
    raise ValueError(
        "the lessons are notebooks of minidist's repository, and no folder of it is here: clone it, and call "
        "minidist lessons there"
    )


def lessons(place: Path) -> list[Lesson]:
    """The lessons of a folder, in order, with what has passed."""
    passed = _read_progress(place)
    costs = _read(place / "costs.json")
    found = []
    for source in sorted(place.glob("[0-9][0-9]_*.py")):
        text = source.read_text(encoding="utf-8")
        title = re.search(r"^# # \d+\. (.+)$", text, re.MULTILINE)
        names = re.findall(r"^(\w+) = or_solution\(\1\)", text, re.MULTILINE)
        done = passed.get(source.stem[3:], {})
        seconds = costs.get(source.stem, {}).get("seconds")
        found.append(
            Lesson(
                int(source.stem[:2]),
                title[1] if title else source.stem[3:],
                tuple(names),
                tuple(name for name in names if name in done),
                seconds,
            )
        )
    return found


def open_lab(place: Path) -> int:
    """Run JupyterLab in the folder until it ends, or Ctrl-C ends it; its exit code.

    Raises:
        ValueError: JupyterLab is not installed.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("minidist lessons needs jupyterlab: pip install 'minidist[lessons]'")
    # Ctrl-C reaches both processes: with -y the server ends without a question, and this one waits for that.
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", "-y"], cwd=place)
    try:
        return server.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_TIMEOUT)
        raise
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _read_progress(place: Path) -> dict[str, Any]:
    path = Path(os.environ.get("MINIDIST_LESSONS_PROGRESS") or place / ".progress.json")
    passed = _read(path).get("passed", {})
    return passed if isinstance(passed, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def show(console: Console, found: Sequence[Lesson]) -> None:
    """Print the table of lessons."""
    from rich import box
    from rich.table import Table

    table = Table("", "lesson", box=box.SIMPLE_HEAD, title="The lessons", title_justify="left")
    table.add_column("exercises passed", justify="right")
    table.add_column("runs in", justify="right")
    for each in found:
        done, all_of_them = len(each.passed), len(each.exercises)
        style = "green" if all_of_them and done == all_of_them else ""
        minutes = "" if each.seconds is None else f"{max(0.1, each.seconds / 60):.1f} min"
        table.add_row(f"{each.number:02d}", each.title, f"{done} of {all_of_them}", minutes, style=style)
    console.print(table)
