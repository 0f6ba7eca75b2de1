"""The command `minidist lessons`: a reader's progress, and JupyterLab in the lessons' folder.

    minidist lessons                  in a clone of the repository, or where a copy of the lessons lies
    minidist lessons --to my-lessons  copy the lessons that a wheel brings, and open them there
    minidist lessons --export nbgrader --to course   make assignments of them, for teachers

The lessons' checks write to .progress.json in that folder which exercises have passed, and which of them at
par (at the cost of the lesson's own answer). Delete that file to start again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minidist._files import whole
from minidist.cli.options import Debug, Json
from minidist.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.console import Console

STOP_TIMEOUT = 10.0
"""Seconds that JupyterLab has to end after Ctrl-C."""


def lessons(
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Copy the lessons into this folder first.")
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="For teachers: write assignments there; nbgrader or otter."),
    ] = None,
    progress: Annotated[bool, typer.Option("--progress", help="Print only the table.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which exercises have passed, then open JupyterLab in the lessons' folder; Ctrl-C ends it.

    Where the table goes to a file or a pipe, JupyterLab stays closed.
    --to copies the lessons into a folder of yours. Files that lie there already stay as they are. With
    --export it gets assignments instead, with graded checks, and the solutions in the teacher's copy.
    """
    if export is not None:
        from minidist.cli import lessons_export

        if to is None:
            raise ValueError(f"--export {export} needs a folder for the course; add --to FOLDER")
        new = lessons_export.export(shipped(), export, to)
        text = f"{len(new)} new files in {to}; those that were there stay. To go on:\n"
        text += f"  cd {shlex.quote(str(to))} && {lessons_export.FORMATS[export].then}"
        console().print(text, highlight=False, markup=False, soft_wrap=True)
        return
    at = folder() if to is None else copy(to)
    found = read_lessons(at)
    if as_json:
        print_json({"folder": str(at), "lessons": [dataclasses.asdict(each) for each in found]})
        return
    show(console(), found)
    if not progress and sys.stdout.isatty() and open_lab(at):
        raise typer.Exit(1)


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A lesson with its exercises."""

    number: int
    title: str
    exercises: tuple[str, ...]  # names, in order
    passed: tuple[str, ...]  # names of the passed exercises
    at_par: tuple[str, ...]  # names of those that passed at par
    hours: float | None  # that a person needs, as the lesson says
    seconds: float | None  # recorded duration of the whole notebook


def folder() -> Path:
    """The folder of the lessons: this checkout's, or one in the current directory; ValueError without one."""
    here = Path.cwd()
    for path in (Path(__file__).resolve().parents[2] / "lessons", here / "lessons", here):
        if (path / "checks" / "figures.py").exists():
            return path
    raise ValueError(
        f"there are no lessons in {here}; minidist lessons --to FOLDER copies them into a folder"
    )


def shipped() -> Path:
    """The folder of the lessons that belong to this package: in a checkout the repository's own."""
    return (Path(__file__).parents[1] / "lessons").resolve()


def copy(to: Path) -> Path:
    """Copy the package's lessons into a folder and return it. Existing files stay: they may hold answers.

    Raises ValueError if `to` is a file or lies in a folder that may not be written.
    """

    def unless_there(source: str, target: str) -> None:
        if not os.path.lexists(target):
            with whole(target):  # the next copy would take a part of a file for an answer, and leave it
                shutil.copyfile(source, target)

    if to.exists() and not to.is_dir():
        raise ValueError(f"--to is {to}, which is a file; name a folder for the lessons")
    own = shutil.ignore_patterns(".*", "__pycache__")  # another reader's progress, and compiled files
    try:
        shutil.copytree(shipped(), to, ignore=own, copy_function=unless_there, dirs_exist_ok=True)
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # it lists every file
        raise ValueError(f"--to is {to}, and copying there failed: {why}; name another folder") from None
    return to


def read_lessons(at: Path) -> list[Lesson]:
    """Read the lessons of a folder, in order, with the exercises that have passed."""
    progress = Path(os.environ.get("MINIDIST_LESSONS_PROGRESS") or at / ".progress.json")
    kept = _read(progress)
    passed, best = (each if isinstance(each := kept.get(key), dict) else {} for key in ("passed", "at_par"))
    costs = _read(at / "costs.json")
    found = []
    for source in sorted(at.glob("[0-9][0-9]_*.py")):
        text = source.read_text(encoding="utf-8")
        title = re.search(r"^# # \d+\. (.+)$", text, re.MULTILINE)
        names = re.findall(r"^(\w+) = or_solution\(\1\)", text, re.MULTILINE)
        done, at_par = (each.get(source.stem[3:], {}) for each in (passed, best))
        hours = re.search(r"^# \*\*Time:\*\* about (?:(\d+) minutes|([\d.]+) hours?)", text, re.MULTILINE)
        seconds = costs.get(source.stem, {}).get("seconds")
        found.append(
            Lesson(
                int(source.stem[:2]),
                title[1] if title else source.stem[3:],
                tuple(names),
                tuple(name for name in names if name in done),
                tuple(name for name in names if name in done and name in at_par),
                None if hours is None else int(hours[1]) / 60 if hours[1] else float(hours[2]),
                seconds,
            )
        )
    return found


def open_lab(at: Path) -> int:
    """Run JupyterLab in a folder until it ends or Ctrl-C ends it; return its exit code.

    Raises ValueError if JupyterLab is not installed.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("minidist lessons needs jupyterlab: pip install 'minidist[lessons]'")
    # Ctrl-C reaches both processes. With -y the server ends without asking, and this process waits for it.
    # In a container you are often root, and JupyterLab refuses to start as root without this option.
    root = ["--allow-root"] if os.geteuid() == 0 else []
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", "-y", *root], cwd=at)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def show(terminal: Console, found: Sequence[Lesson]) -> None:
    """Print the table of lessons."""
    from rich import box
    from rich.table import Table

    table = Table("", "lesson", box=box.SIMPLE_HEAD, title="The lessons", title_justify="left")
    for heading in ("exercises passed", "at par", "you need", "runs in"):
        table.add_column(heading, justify="right")
    for each in found:
        done, all_of_them = len(each.passed), len(each.exercises)
        style = "green" if all_of_them and done == all_of_them else ""
        minutes = "" if each.seconds is None else f"{max(0.1, each.seconds / 60):.1f} min"
        hours = "" if each.hours is None else f"{each.hours:g} h"
        table.add_row(
            f"{each.number:02d}",
            each.title,
            f"{done} of {all_of_them}",
            str(len(each.at_par)),
            hours,
            minutes,
            style=style,
        )
    terminal.print(table)
