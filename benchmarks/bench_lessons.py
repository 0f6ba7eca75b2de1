"""The cost of the lessons' own solutions, as the lessons' checks count it, against par.

A check counts what an answer costs: bytes that a rank sends, transactions of a warp, multiplications. Par is
the cost of a good answer, so a solution above par, or a check that counts wrongly, shows here. Where a check
counts several things, the row has the one furthest from par. The time is that of the whole check.
"""

from __future__ import annotations

import ast
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.cli import lessons

pytestmark = pytest.mark.no_finding

GROUP = "Lessons: what the solutions cost against par"
COUNTING = {"Score", "Tally"}
"""Names from `checks.support.verdicts`: a check that uses one of them counts a cost."""
SEED = 0
"""The seed of a check's inputs: the same in each run, so that costs can be compared."""

FOLDER = lessons.shipped()


def counted(checks: str, names: tuple[str, ...]) -> list[str]:
    """The exercises of a lesson whose check counts a cost, found in the text of its module of checks."""
    used: dict[str, set[str]] = {}
    for node in ast.parse(checks).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            used[node.name] = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found = []
    for name in names:
        reached, left = set[str](), {name}
        while left:
            reached |= left
            left = {other for each in left for other in used.get(each, ())} - reached
        if reached & COUNTING:
            found.append(name)
    return found


def exercises(folder: Path) -> list[tuple[str, str]]:
    """The stems of all lessons, with their exercises that count a cost."""
    found = []
    for source, lesson in zip(
        sorted(folder.glob("[0-9][0-9]_*.py")), lessons.read_lessons(folder), strict=True
    ):
        checks = (folder / "checks" / f"{source.stem[3:]}.py").read_text(encoding="utf-8")
        found += [(source.stem, name) for name in counted(checks, lesson.exercises)]
    return found


@pytest.fixture(scope="module")
def checks() -> Iterator[None]:
    """Put the lessons' folder on the path, for `checks` and `solutions`; end their ranks with the suite."""
    sys.path.insert(0, str(FOLDER))
    yield
    ranks = sys.modules.get("checks.ranks")
    for world in getattr(ranks, "_worlds", {}).values():
        world.close()
    sys.path.remove(str(FOLDER))


@compared(GROUP)
@pytest.mark.parametrize(("stem", "name"), exercises(FOLDER))
def test_solution(benchmark: Benchmark, checks: None, stem: str, name: str) -> None:
    """The check's verdict on the lesson's own answer."""
    try:
        lesson: Any = importlib.import_module(f"checks.{stem[3:]}").lesson
    except ImportError as error:  # a lesson that needs a missing package says so
        pytest.skip(str(error))
    start = time.perf_counter()
    try:
        verdict = lesson.judge(name, lesson.solution(name), SEED)
    except importlib.import_module("checks.support.verdicts").Interrupted:
        raise KeyboardInterrupt from None  # Ctrl-C ends the whole run
    seconds = time.perf_counter() - start
    if not verdict.scores:
        pytest.skip(f"the check of {name} counts nothing on this machine")
    record(benchmark, [seconds])
    enter(benchmark.extra_info, f"{lesson.exercises[name].label} {name}", verdict.scores)


def enter(extra: dict[str, Any], label: str, scores: Any) -> None:
    """Record the score furthest from par, and all scores next to it."""
    worst = max(scores, key=lambda score: score.cost / score.par if score.par else score.cost)
    extra |= {
        "label": f"{label}: {worst.what[0].lower()}{worst.what[1:]}",
        "cost": float(worst.cost),
        "par": float(worst.par),
        "unit": worst.unit,
        "scores": [
            {"what": each.what, "cost": float(each.cost), "par": float(each.par), "unit": each.unit}
            for each in scores
        ],
    }
    if worst.over:
        extra["note"] = f"above par: {worst.idea}" if worst.idea else "above par"
