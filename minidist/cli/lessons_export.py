"""Export the lessons as assignments for a course: for nbgrader, or for Otter-Grader.

    minidist lessons --export nbgrader --to course
    cd course && nbgrader generate_assignment 08_ranks_that_talk

An exported notebook is the teacher's copy of a lesson. Each exercise's cell has the stub and below it the
solution, between two lines at which the grader's own command cuts it out of the students' copy. Each check
becomes a graded cell: it raises if the answer is refused, and gives two points of three if the answer passes
above par. The checks come with minidist, so students and the grading machine have to install it.

Sources: nbgrader's cell metadata, schema version 3 (nbgrader/nbgraderformat/v3.py); Otter Assign's notebook
format, version 1, with exception-based tests (its documentation, "Notebook Format").
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidist._files import whole
from minidist._names import unknown

POINTS = 3
"""Points for a solution at par."""
PASSED = 2
"""Points for an answer that passes above par: `check(answer, points=3)` returns two thirds."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """The form that a grader gives to a course."""

    begin: str  # the line before a solution
    end: str  # the line after it
    # From a cell of a lesson, with all solutions.
    convert: Callable[[Cell, Mapping[str, str], Format], Iterator[Cell]]
    header: tuple[Cell, ...]  # cells that come before the lesson's own
    then: str  # the command that makes the students' copy
    source: str = ""  # the folder of the notebooks, in the course's
    files: Mapping[str, str] = field(default_factory=dict)  # other files of the course, by name


def export(lessons: Path, kind: str, to: Path) -> list[Path]:
    """Write every lesson of a folder as an assignment; return the new files. Existing files stay.

    Args:
        lessons: the folder of the lessons, with notebooks and solutions.
        kind: "nbgrader" or "otter".
        to: the folder of the course.

    Raises:
        ValueError: `kind` is neither, or a file cannot be written.
    """
    if kind not in FORMATS:
        raise unknown("format to export", kind, FORMATS)
    made = {to / name: text for name, text in FORMATS[kind].files.items()}
    for path in sorted(lessons.glob("[0-9][0-9]_*.ipynb")):
        solutions = definitions((lessons / "solutions" / f"{path.stem}.py").read_text(encoding="utf-8"))
        notebook = assignment(json.loads(path.read_text(encoding="utf-8")), solutions, FORMATS[kind])
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        made[to / FORMATS[kind].source / path.stem / path.name] = text
    new = [path for path in made if not (path.exists() or path.is_symlink())]
    try:
        for path in new:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path):
                path.write_text(made[path], encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--to is {to}, and writing there failed: {error}; name another folder") from None
    return new


def assignment(notebook: dict[str, Any], solutions: Mapping[str, str], form: Format) -> dict[str, Any]:
    """Return the teacher's copy of a lesson's notebook."""
    lesson = [new for cell in notebook["cells"] for new in form.convert(cell, solutions, form)]
    return notebook | {"cells": [*form.header, *lesson]}


def definitions(text: str) -> dict[str, str]:
    """Return the text of each function and class of a program, by name, with its decorators."""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def solved(cell: Cell, solutions: Mapping[str, str], form: Format) -> tuple[str, Cell]:
    """Return the name of an exercise's function, and its cell with the solution below the stub."""
    stub = "".join(cell["source"])
    (name,) = definitions(stub)
    return name, cell | {"source": f"{stub}\n{form.begin}\n{solutions[name]}\n{form.end}"}


def _is_exercise(cell: Cell) -> bool:
    return "exercise" in cell["metadata"].get("tags", ())


def _for_nbgrader(cell: Cell, solutions: Mapping[str, str], form: Format) -> Iterator[Cell]:
    """An exercise becomes a solution cell, its check a graded one; other cells stay as they are."""
    checked = re.fullmatch(r"check\((\w+)\)\s*", "".join(cell["source"]))
    if checked:
        graded = cell | {"source": f"check({checked[1]}, points={POINTS})"}
        yield _marked(graded, f"check-{checked[1]}", grade=True, locked=True, points=POINTS)
    elif _is_exercise(cell):
        name, cell = solved(cell, solutions, form)
        yield _marked(cell, f"exercise-{name}", solution=True)
    else:
        yield cell


def _marked(cell: Cell, grade_id: str, **fields: Any) -> Cell:
    """A cell with the metadata that nbgrader reads."""
    flags = {"grade": False, "solution": False, "locked": False, "task": False, **fields}
    marks = {"schema_version": 3, "grade_id": grade_id, "cell_type": cell["cell_type"], **flags}
    return cell | {"metadata": cell["metadata"] | {"nbgrader": marks}}


def _for_otter(cell: Cell, solutions: Mapping[str, str], form: Format) -> Iterator[Cell]:
    """An exercise becomes a question with two hidden tests, one for passing and one for par.

    The tests run after the last cell. By then `or_solution` has put the lesson's own answer in the place of
    one that was refused; `check` knows that answer and refuses it too.
    """
    if not _is_exercise(cell):
        yield cell
        return
    name, cell = solved(cell, solutions, form)
    points = f"points:\n    - {PASSED}\n    - {POINTS - PASSED}"
    yield raw(f"# BEGIN QUESTION\nname: {name}\ncheck_cell: false\n{points}", f"{name}-question")
    yield raw("# BEGIN SOLUTION", f"{name}-solution")
    yield cell
    yield raw("# END SOLUTION", f"{name}-solution-end")
    yield raw("# BEGIN TESTS", f"{name}-tests")
    yield code(f"# HIDDEN\ndef passes(check, {name}):\n    check({name})", f"{name}-passes")
    par = f"assert check({name}, points={POINTS}) == {POINTS}"
    yield code(f"# HIDDEN\ndef at_par(check, {name}):\n    {par}", f"{name}-at-par")
    yield raw("# END TESTS", f"{name}-tests-end")
    yield raw("# END QUESTION", f"{name}-question-end")


def raw(source: str, name: str) -> Cell:
    """A cell that is not run."""
    return {"cell_type": "raw", "id": name.replace("_", "-"), "metadata": {}, "source": source}


def code(source: str, name: str) -> Cell:
    """A cell of Python."""
    return raw(source, name) | {"cell_type": "code", "execution_count": None, "outputs": []}


SET_UP = code(
    """\
# This cell finds the checks, which come with minidist. Leave it first.
import os
import sys

from minidist.cli.lessons import shipped

sys.path.insert(0, str(shipped()))
os.environ["MINIDIST_LESSONS_PROGRESS"] = ".progress.json\"""",
    "set-up",
)
NBGRADER_CONFIG = """\
c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "minidist"
c.Execute.timeout = 300  # seconds of a cell; many checks start processes
c.ClearSolutions.code_stub = {"python": ""}  # the lesson's own stub stays
"""
OTTER_CONFIG = """\
# ASSIGNMENT CONFIG
tests:
    ok_format: false"""
FORMATS: dict[str, Format] = {
    "nbgrader": Format(
        "### BEGIN SOLUTION",
        "### END SOLUTION",
        _for_nbgrader,
        (_marked(SET_UP, "set-up", locked=True),),
        "nbgrader generate_assignment 00_your_machine",
        "source",
        {"nbgrader_config.py": NBGRADER_CONFIG},
    ),
    "otter": Format(
        "# BEGIN SOLUTION NO PROMPT",
        "# END SOLUTION",
        _for_otter,
        (raw(OTTER_CONFIG, "config"), SET_UP),
        "otter assign 00_your_machine/00_your_machine.ipynb dist",
    ),
}
"""The graders that lessons can be exported for, by name."""
