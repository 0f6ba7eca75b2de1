"""The lessons: notebooks equal their sources, checks pass solutions and find what is wrong, all cells run.

make lessons-check      # also those marked `lessons` and `browser`: every notebook from top to bottom
"""

from __future__ import annotations

import contextlib
import importlib
import json
import linecache
import os
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checks.support import notebooks, progress
from checks.support.catalogue import TITLES
from checks.support.exercises import Lesson
from checks.support.verdicts import NotAnswered, WrongAnswer
from minidist.cli.lessons_export import definitions
from minidist.kernels.emulator.mistakes.patches import changed
from tests.helpers import warm_python
from tests.lessons import LESSONS
from tests.lessons.wrong_answers import Wrong, wrong_answers

SOURCES = notebooks.sources()
STEMS = [source.stem for source in SOURCES]
COSTS = LESSONS / "costs.json"
OUTPUTS = LESSONS.parent / "build" / "lessons"
"""Solved lessons with their outputs, which `make site` shows."""
CELL_LIMIT = 300  # seconds; a crowded machine is no error


def lesson_of(stem: str) -> Lesson:
    return importlib.import_module(f"checks.{stem[3:]}").lesson


def exercise_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", ())]


def solved(notebook: Any, stem: str) -> Any:
    """The notebook with each exercise's stub replaced by the solution's text."""
    answers = definitions((LESSONS / "solutions" / f"{stem}.py").read_text())
    for cell in exercise_cells(notebook):
        cell.source = "\n\n\n".join(answers[name] for name in definitions(cell.source))
    return notebook


ANSWERS = [answer for stem in STEMS for answer in wrong_answers(stem)]
WRONG = [answer for answer in ANSWERS if not answer.passes]
DEAR = [answer for answer in ANSWERS if answer.passes]
SEED = int(os.environ.get("MINIDIST_SEED", "0"))
"""Of the inputs that wrong answers are tried on; what a check says of them is the same on every seed."""


@pytest.fixture(autouse=True, scope="module")
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Progress of tests is nobody's progress; ranks end with the last test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDIST_LESSONS_PROGRESS", str(tmp_path_factory.mktemp("progress") / "progress.json"))
        yield
    if ranks := sys.modules.get("checks.ranks"):
        ranks.close()


@pytest.mark.parametrize("source", SOURCES, ids=STEMS)
def test_a_notebook_is_what_its_source_says(source: Path) -> None:
    assert source.with_suffix(".ipynb").read_text() == notebooks.text(source), "run make notebooks"


@pytest.mark.parametrize("source", SOURCES, ids=STEMS)
def test_a_lesson_has_its_parts(source: Path) -> None:
    lesson, text = lesson_of(source.stem), source.read_text()
    assert lesson.stem == source.stem
    assert f"# # {lesson.number}. {TITLES[lesson.number]}\n" in text
    assert f"ladder({lesson.number})" in text
    for part in ("**The question.**", "prediction = None", "What breaks in practice", "## Further reading"):
        assert part in text, f"{source.name} has no {part}"
    title = f"# # {lesson.number}. {TITLES[lesson.number]}\n#\n"
    assert re.search(re.escape(title) + r"# \*\*Time:\*\* about [\d.]+ hours?.*\*\*Builds on:\*\* ", text)
    readings = text[text.index("## Further reading") :].partition("## Where your lines live")[0]
    assert len(re.findall(r"^# - ", readings, re.MULTILINE)) == 3


@pytest.mark.parametrize("source", SOURCES, ids=STEMS)
def test_exercises_stand_in_the_lesson_and_are_open(source: Path) -> None:
    lesson, made = lesson_of(source.stem), notebooks.notebook(source)
    found: list[str] = []
    for cell in exercise_cells(made):
        (name,) = [each for each in definitions(cell.source) if each in lesson.exercises]
        found.append(name)
        scope: dict[str, Any] = {}
        plain = re.sub(r"^@.*\n", "", cell.source, flags=re.MULTILINE)  # no compiler is needed for this
        cell_name = f"<exercise {name}>"
        linecache.cache[cell_name] = (len(plain), None, plain.splitlines(keepends=True), cell_name)
        exec(compile(plain, cell_name, "exec"), scope)
        exercise = lesson.exercises[name]
        assert f"# **Exercise {exercise.label}: " in source.read_text()
        assert f"check({name})" in source.read_text()
        assert f"{name} = or_solution({name})" in source.read_text()
        assert "# about " in cell.source or re.search(r"# \d+ lines?", cell.source), f"how long is {name}?"
        assert len(exercise.hints) == 3
        with pytest.raises(NotAnswered, match=f"Exercise {exercise.label}, {name}, has no answer yet"):
            lesson.judge(name, scope[name])
    assert found == list(lesson.exercises)


def wrong_cases() -> Iterator[Any]:
    """All of them; every run tries the first of each exercise, and `-m deep` the others."""
    tried: set[tuple[str, str]] = set()
    for wrong in WRONG:
        more = (wrong.stem, wrong.exercise) in tried
        tried.add((wrong.stem, wrong.exercise))
        name = f"{wrong.stem[:2]}-{wrong.exercise}-{wrong.name}"
        yield pytest.param(wrong, id=name, marks=[pytest.mark.deep] if more else [])


@pytest.mark.parametrize("wrong", list(wrong_cases()))
def test_a_check_finds_what_is_wrong(wrong: Wrong) -> None:
    with pytest.raises(WrongAnswer) as found:
        lesson_of(wrong.stem).judge(wrong.exercise, wrong.answer, seed=SEED)
    message = str(found.value)
    assert not [words for words in wrong.says if words not in message], message
    assert "Traceback" not in message
    assert str(LESSONS) not in message, "the reader has no such file"


@pytest.mark.deep
@pytest.mark.parametrize("dear", DEAR, ids=[f"{d.stem[:2]}-{d.exercise}" for d in DEAR])
def test_an_answer_above_par_passes_and_is_told(dear: Wrong) -> None:
    said = str(lesson_of(dear.stem).judge(dear.exercise, dear.answer))
    assert said.startswith("Right")
    assert not [words for words in dear.says if words not in said], said


@pytest.mark.parametrize("stem", STEMS)
def test_each_exercise_has_three_wrong_answers(stem: str) -> None:
    """Each of them fits the solution as it is now."""
    mine = [wrong for wrong in WRONG if wrong.stem == stem]
    given = Counter(wrong.exercise for wrong in mine)
    assert set(given) == set(lesson_of(stem).exercises)
    assert min(given.values()) >= 3
    for wrong in mine:
        compile(wrong.text, wrong.name, "exec")


@pytest.mark.parametrize(
    "change", ["-total = 1", "~total => sum", "-total = 0\n-return x", "~== => <", "?total"]
)
def test_a_change_that_fits_nowhere_or_twice_is_an_error(change: str) -> None:
    solution = "def f(x):\n    total = 0  # so far\n    total += x\n    return total"
    assert changed(solution, ["-total = 0", "+total = 1"]) == solution.replace("0  # so far", "1")
    with pytest.raises(ValueError, match=r"has .* \d times, not 1"):
        changed(solution, change.split("\n"))


class Memory(threading.Thread):
    """Peak memory of a process and all it has started, in bytes; what processes share is counted once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.ended = pid, 0, threading.Event()

    def run(self) -> None:
        import psutil

        kernel = psutil.Process(self.pid)
        while not self.ended.wait(0.5):
            total = 0
            for process in (kernel, *kernel.children(recursive=True)):
                try:
                    full = process.memory_full_info()
                    total += getattr(full, "pss", full.rss)
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)


def execute(client: Any, notebook: Any, stop: bool = True) -> float:
    """Run all cells in the client's kernel; the seconds it took."""
    client.nb, client.allow_errors = notebook, not stop
    client.reset_execution_trackers()
    began = time.monotonic()
    for index, cell in enumerate(notebook.cells):
        client.execute_cell(cell, index)
    return time.monotonic() - began


def both_ways(source: Path) -> tuple[Any, list[Any]]:
    """The lesson with each exercise answered and left open; and the checks that find an open one.

    The cells below an exercise run once: below the first, third ... with the reader's answer, and below the
    others with the lesson's own, which they get where it is left open.
    """
    from nbformat.v4 import new_code_cell as code_cell

    answered, blank = solved(notebooks.notebook(source), source.stem), notebooks.notebook(source)
    lesson, cells, opened, last = lesson_of(source.stem), [], [], ""
    own: list[Any] = []  # the open cells of the last exercise, where they come last
    names = iter(lesson.exercises)
    for cell, stub in zip(answered.cells, blank.cells, strict=True):
        if "exercise" in cell.metadata.get("tags", ()):
            name, reader_first = next(names), len(opened) % 2
            last = f"{name} = or_solution({name})"
            check, go_on = code_cell(f"check({name})"), code_cell(last)
            check.metadata["tags"] = ["raises-exception"]
            opened.append(check)
            cells += [cell] if reader_first else [stub, check, go_on, cell]
            own = [stub, check, go_on] if reader_first else []
            continue
        cells.append(cell)
        if own and cell.source.startswith(last):
            cells += own
            own = []
    assert not own
    answered.cells = cells
    return answered, opened


def errors_in(notebook: Any) -> list[tuple[str, str]]:
    """Return each failed cell's text, and the kind of its error."""
    return [
        (cell.source, output.ename)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    ]


@pytest.mark.lessons
@pytest.mark.parametrize("source", SOURCES, ids=STEMS)
def test_a_lesson_runs_from_top_to_bottom_with_exercises_solved_and_open(source: Path) -> None:
    notebook, opened = both_ways(source)
    with warm_python.kernels(), running(notebook) as client:
        execute(client, notebook)
    lesson = lesson_of(source.stem)
    for exercise, check in zip(lesson.exercises.values(), opened, strict=True):
        (error,) = [output for output in check.outputs if output.output_type == "error"]
        assert error.ename == "NotAnswered"
        says = f"Exercise {exercise.label}, {exercise.name}, has no answer yet: write it in the cell above"
        assert says in error.evalue
    # Every check of the lesson's own has met its solution, at par.
    assert set(progress.read("at_par")[source.stem[3:]]) == set(lesson.exercises)


@pytest.mark.lessons
@pytest.mark.skipif("MINIDIST_LESSONS_COSTS" not in os.environ, reason="make lessons-check runs and keeps it")
@pytest.mark.parametrize("source", SOURCES, ids=STEMS)
def test_what_a_lesson_costs_and_that_it_runs_blank(source: Path) -> None:
    """In one kernel, whose start and imports cost seconds: the blank lesson begins without any names."""
    from nbformat.v4 import new_code_cell

    answered, blank = solved(notebooks.notebook(source), source.stem), notebooks.notebook(source)
    with running(answered) as client:
        memory = Memory(client.km.provisioner.pid)
        memory.start()
        try:
            seconds = execute(client, answered)
        finally:
            memory.ended.set()
            memory.join()
        blank.cells.insert(0, new_code_cell("%reset -f"))
        execute(client, blank, stop=False)
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    (OUTPUTS / f"{source.stem}.ipynb").write_text(json.dumps(answered))
    costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    costs[source.stem] = {"seconds": round(seconds), "peak_megabytes": round(memory.peak / 1e6)}
    COSTS.write_text(json.dumps(costs, indent=1, sort_keys=True) + "\n")
    open_checks = [(f"check({name})", "NotAnswered") for name in lesson_of(source.stem).exercises]
    assert errors_in(blank) == open_checks


@contextlib.contextmanager
def running(notebook: Any) -> Iterator[Any]:
    """A client with a kernel for a notebook of the lessons."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Jupyter's own packages warn of is not ours to mend
        from nbclient import NotebookClient

        place = {"metadata": {"path": str(LESSONS)}}
        # A kernel that is asked to end may take 2.5 s for it.
        client = NotebookClient(notebook, timeout=CELL_LIMIT, resources=place, shutdown_kernel="immediate")
        with client.setup_kernel():
            yield client
