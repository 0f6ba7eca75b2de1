"""Lessons as assignments: the students' copy is the lesson, and graded cells give the checks' points."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from minidist.cli.lessons import shipped
from minidist.cli.lessons_export import FORMATS, POINTS, Cell, assignment, code, definitions, export
from tests.conftest import Run
from tests.helpers import warm_python
from tests.helpers.clocks import HANG
from tests.lessons.wrong_answers import wrong_answers

LESSONS = shipped()
STEMS = [path.stem for path in sorted(LESSONS.glob("[0-9][0-9]_*.ipynb"))]


def lesson(stem: str) -> dict[str, Any]:
    return json.loads((LESSONS / f"{stem}.ipynb").read_text())


def solutions(stem: str) -> dict[str, str]:
    return definitions((LESSONS / "solutions" / f"{stem}.py").read_text())


def text(cell: Cell) -> str:
    return "".join(cell["source"])


def exercises(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if "exercise" in cell["metadata"].get("tags", ())]


def students(cell: Cell, kind: str) -> str:
    """A cell in the students' copy: without what stands between the two lines of a solution."""
    begin, end = (re.escape(line) for line in (FORMATS[kind].begin, FORMATS[kind].end))
    return re.sub(rf"\n{begin}\n.*\n{end}", "", text(cell), flags=re.DOTALL)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stem", STEMS)
def test_the_students_copy_is_the_lesson_and_the_teachers_has_the_solutions(stem: str, kind: str) -> None:
    before, answers = lesson(stem), solutions(stem)
    made = assignment(before, answers, FORMATS[kind])
    assert [students(cell, kind) for cell in exercises(made)] == [text(cell) for cell in exercises(before)]
    for cell in exercises(made):
        (name,) = definitions(students(cell, kind))
        assert definitions(text(cell))[name] == answers[name]
    ids = [cell["id"] for cell in made["cells"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("stem", STEMS)
def test_nbgrader_finds_a_graded_check_for_each_exercise(stem: str) -> None:
    made = assignment(lesson(stem), solutions(stem), FORMATS["nbgrader"])
    marks = [cell["metadata"]["nbgrader"] for cell in made["cells"] if "nbgrader" in cell["metadata"]]
    names = [name for cell in exercises(lesson(stem)) for name in definitions(text(cell))]
    assert len({each["grade_id"] for each in marks}) == len(marks)
    assert [each["grade_id"] for each in marks if each["solution"]] == [f"exercise-{name}" for name in names]
    graded = [each for each in marks if each["grade"]]
    assert [each["grade_id"] for each in graded] == [f"check-{name}" for name in names]
    assert all(each["locked"] and each["points"] == POINTS for each in graded)


@pytest.mark.parametrize("stem", STEMS[:1])
def test_otter_finds_a_question_for_each_exercise(stem: str) -> None:
    made = assignment(lesson(stem), solutions(stem), FORMATS["otter"])
    raw = [text(cell).splitlines()[0] for cell in made["cells"] if cell["cell_type"] == "raw"]
    question = ["# BEGIN QUESTION", "# BEGIN SOLUTION", "# END SOLUTION", "# BEGIN TESTS", "# END TESTS"]
    count = len(exercises(made))
    assert raw == ["# ASSIGNMENT CONFIG", *[*question, "# END QUESTION"] * count]
    tests = [cell for cell in made["cells"] if text(cell).startswith("# HIDDEN")]
    assert [list(definitions(text(cell))) for cell in tests] == [["passes"], ["at_par"]] * count


def test_what_lies_there_stays(tmp_path: Path, run: Run) -> None:
    mine = tmp_path / "source" / STEMS[0] / f"{STEMS[0]}.ipynb"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    code, out, _ = run("lessons", "--export", "nbgrader", "--to", str(tmp_path))
    assert code in (0, None)
    assert f"{len(STEMS)} new files in {tmp_path}" in out
    assert mine.read_text() == "mine"
    assert sorted(path.stem for path in tmp_path.glob("source/*/*.ipynb")) == STEMS
    assert export(LESSONS, "nbgrader", tmp_path) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--export", "nbgrader"], "needs a folder for the course; add --to FOLDER"),
        (["--export", "nbgradr", "--to", "x"], "did you mean 'nbgrader'?"),
        (["--export", "otter", "--to", __file__], "writing there failed"),
    ],
)
def test_a_wrong_option_says_what_to_do(words: list[str], says: str, run: Run) -> None:
    code, _, err = run("lessons", *words)
    assert code == 2
    assert says in err


def ran(cells: list[Cell], at: Path) -> list[Cell]:
    """The cells with their outputs, run as nbgrader runs them: an error does not stop it."""
    with warnings.catch_warnings(), warm_python.kernels():
        warnings.simplefilter("ignore")  # what Jupyter's own packages warn of is not ours to mend
        import nbformat
        from nbclient import NotebookClient

        text = json.dumps(lesson(STEMS[0]) | {"cells": cells})
        made = nbformat.reads(text, as_version=4)
        settings = {"resources": {"metadata": {"path": str(at)}}, "shutdown_kernel": "immediate"}
        NotebookClient(made, timeout=HANG, allow_errors=True, **settings).execute()
    return made.cells


def points(cell: Cell) -> float:
    """What nbgrader gives for a graded cell: none with an error or a warning, else the value it ends with."""
    for output in cell["outputs"]:
        if output["output_type"] == "error" or output.get("name") == "stderr":
            return 0
        if output["output_type"] == "execute_result":
            return float(output["data"]["text/plain"])
    return float(POINTS)


def graded(cells: list[Cell]) -> list[float]:
    return [points(cell) for cell in cells if text(cell).startswith("check(")]


@pytest.mark.parametrize(
    ("topic", "most"),
    [
        pytest.param("your_machine", 99, marks=pytest.mark.deep),
        pytest.param("shared_memory", 1, marks=pytest.mark.lessons),
        pytest.param("ranks_that_talk", 1, marks=pytest.mark.lessons),
    ],
)
def test_solved_gets_all_points_blank_and_wrong_none(topic: str, most: int, tmp_path: Path) -> None:
    """In one kernel, which takes a second to start: each exercise blank, wrong in some ways, then solved.

    Args:
        topic: of the lesson.
        most: wrong answers to each exercise.
    """
    (stem,) = [stem for stem in STEMS if stem.endswith(topic)]
    made = assignment(lesson(stem), solutions(stem), FORMATS["nbgrader"])
    checks = [cell for cell in made["cells"] if text(cell).startswith("check(")]
    imports = next(cell for cell in made["cells"][1:] if cell["cell_type"] == "code")
    every = [wrong for wrong in wrong_answers(stem) if not wrong.passes]
    cells, right = [made["cells"][0], imports], []
    for solved, check in zip(exercises(made), checks, strict=True):
        name = text(check)[len("check(") :].partition(",")[0]
        wrong = [code(each.text, "wrong") for each in every if each.exercise == name][:most]
        for answer in (solved | {"source": students(solved, "nbgrader")}, *wrong, solved):
            cells += [answer, check]
        right += [0] * (1 + len(wrong)) + [POINTS]
    assert (
        graded(ran([cell | {"id": f"cell-{place}"} for place, cell in enumerate(cells)], tmp_path)) == right
    )
    assert (tmp_path / ".progress.json").exists(), "progress is kept beside the assignment"


@pytest.mark.deep
def test_nbgrader_itself_grades_so(tmp_path: Path) -> None:
    pytest.importorskip("nbgrader", reason="nbgrader is not installed; pip install nbgrader")
    stem, course = STEMS[0], [sys.executable, "-m", "nbgrader"]
    export(LESSONS, "nbgrader", tmp_path)

    def nbgrader(*words: str) -> None:
        subprocess.run([*course, *words], cwd=tmp_path, check=True, timeout=600, capture_output=True)

    nbgrader("generate_assignment", stem)
    for student, copy in (("solved", "source"), ("blank", "release")):
        to = tmp_path / "submitted" / student / stem
        to.mkdir(parents=True)
        (to / f"{stem}.ipynb").write_bytes((tmp_path / copy / stem / f"{stem}.ipynb").read_bytes())
    nbgrader("autograde", stem)
    nbgrader("export")
    with (tmp_path / "grades.csv").open() as file:
        scores = {
            row["student_id"]: float(row["score"]) / float(row["max_score"]) for row in csv.DictReader(file)
        }
    assert scores == {"solved": 1, "blank": 0}
