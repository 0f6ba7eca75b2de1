"""The game of lesson 16: what a hunt costs, which lines are to blame, and that any page can be hunted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from checks import hunting, silent_bugs
from checks.hunting import BEGIN, HINT, PRICES, WRONG, Case
from checks.pictures import evidence
from checks.silent_bugs import CASES
from checks.support import progress
from checks.support.verdicts import NotAnswered, WrongAnswer
from minidist.plain.mistakes import collection
from minidist.plain.mistakes.examine import DETECTORS

BROKEN = "loss = loss_of(model(inputs), targets) / ranks"
MENDED = "loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])"


@pytest.fixture(autouse=True)
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Progress of tests is nobody's progress. The pictures' captions."""
    monkeypatch.setenv("MINIDIST_LESSONS_PROGRESS", str(tmp_path / "progress.json"))
    captions: list[str] = []
    monkeypatch.setattr(evidence, "show", lambda figure, caption, alt: captions.append(caption))
    return captions


def a_case() -> Case:
    return Case("mean-of-means", "It is odd.", 5, "Case 0.")


def test_the_loss_misses_all_six_and_par_asks_a_detector_that_does_not() -> None:
    assert len({case.mistake.kind for case in CASES.values()}) == 6
    page = (Path(__file__).parents[2] / "docs/mistakes.md").read_text()
    for case in CASES.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| {case.name} |"))
        marks = dict(zip(DETECTORS, (cell.strip() for cell in row.split("|")[2:-1]), strict=True))
        assert not marks["loss"]
        assert case.par in {PRICES[name] for name, mark in marks.items() if mark}
    assert {*PRICES} == {*DETECTORS}


def test_a_detector_takes_its_price_once_and_says_what_it_finds(
    capsys: pytest.CaptureFixture[str], shown: list[str]
) -> None:
    case = a_case()
    case.ask()
    assert "norm 10" in capsys.readouterr().out
    case.ask("first loss", "bytes", "gradients")
    case.ask("gradients")
    out = capsys.readouterr().out
    assert "first loss (5 points): the first loss is 4." in out
    assert "bytes (5 points): nothing." in out
    assert "gradients (0 points)" in out
    assert out.endswith("75 of 100 points are left.\n")
    assert shown[0].startswith(("37 of 37 gradients differ", "35 of 37 gradients differ"))
    with pytest.raises(WrongAnswer, match="no detector 'lose'; there are bytes"):
        case.ask("lose")
    assert case.spent == 25


def test_a_line_is_named_by_its_number_or_its_text_and_a_wrong_one_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = a_case()
    number = case.number(BROKEN)
    assert case.page[number - 1].strip() == BROKEN
    assert case.blame(number)
    assert case.blame(BROKEN)
    assert case.spent == 0
    assert not case.blame("optimizer.step()")
    assert (case.spent, case.points) == (WRONG, BEGIN - WRONG)
    assert "does not go wrong here. 80 points are left" in capsys.readouterr().out
    for line, says in ((0, "from 1 to 45"), ("nothing", "no line"), ("", "it is there")):
        with pytest.raises(WrongAnswer, match=says):
            case.blame(line)


def test_where_lines_are_missing_both_sides_of_the_gap_are_to_blame() -> None:
    case = CASES["case_3"]
    assert case.number("self.reduce()") in case.culprits
    assert case.number("output.register_hook(lambda gradient: self.gather())") in case.culprits
    assert len(case.culprits) <= 4


@pytest.mark.parametrize(
    ("mend", "misses", "says"),
    [
        ({BROKEN: BROKEN + " / 1"}, 1, "You have the right place. 80 of 100 points are left"),
        ({"optimizer.step()": "pass"}, 1, "The mistake is in another line. 80 of 100"),
        ({BROKEN: "loss = ("}, 0, "no Python any more"),
        (
            {BROKEN: f"{BROKEN} * weight"},
            0,
            "'weight' is not defined.\n  A mend that does not run costs nothing",
        ),
        ({"x": "y"}, 0, "no line of the page"),
        ({}, 0, "A mend is a dictionary"),
    ],
)
def test_a_refused_mend_costs_and_what_is_no_mend_does_not(mend: Any, misses: int, says: str) -> None:
    case = a_case()
    with pytest.raises(WrongAnswer, match=says):
        case.mend(mend, seed=0)
    assert (case.misses, case.closed) == (misses, None)


def test_new_text_takes_the_indentation_of_the_line_it_replaces() -> None:
    case = a_case()
    text = case.mended({BROKEN: "if True:\n    a = 1\n\nb = 2", "optimizer.step()": "", 1: case.page[0]})
    assert "\n        if True:\n            a = 1\n\n        b = 2\n" in text
    assert "step()" not in text
    as_it_is = case.mended({BROKEN: "         # a comment"})
    assert "\n         # a comment\n" in as_it_is


def test_the_first_mend_that_passes_closes_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    case = a_case()
    case.blame(1)
    case.mend({BROKEN: MENDED}, seed=0)
    assert (
        "Right on 2 inputs. Points spent: 20 (par 5). 80 of 100 points are yours." in capsys.readouterr().out
    )
    with pytest.raises(WrongAnswer):
        case.mend({BROKEN: "loss = loss_of(model(inputs), targets)"}, seed=0)
    case.ask("norm")
    case.blame(1)
    assert (case.closed, case.points) == (80, 80)


def test_who_is_told_what_it_was_gets_no_points(capsys: pytest.CaptureFixture[str]) -> None:
    case = a_case()
    case.debrief()
    case.mend({BROKEN: MENDED}, seed=0)
    assert case.closed == 0
    assert " 0 of 100 points are yours" in capsys.readouterr().out


def test_a_mend_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunting, "LIMIT", 0.5)  # by then the threads of the ranks have started
    with pytest.raises(WrongAnswer, match="On 2 ranks the mended page had not ended after 0 s"):
        a_case().mend({BROKEN: f"import time\ntime.sleep(1)\n{MENDED}"}, seed=0)


def test_the_score_is_that_of_the_first_time(capsys: pytest.CaptureFixture[str], shown: list[str]) -> None:
    def case_1() -> Any: ...

    with mock.patch.dict(CASES, case_1=a_case()):
        with pytest.raises(NotAnswered):
            silent_bugs.check(case_1)
        silent_bugs.hint(case_1)
        hints = CASES["case_1"].hints
        assert CASES["case_1"].spent == HINT * hints

        def case_1() -> Any:
            return {BROKEN: MENDED}

        silent_bugs.check(case_1)
        assert progress.read("points") == {"silent_bugs": {"case_1": BEGIN - HINT * hints}}
        CASES["case_1"] = a_case()
        silent_bugs.check(case_1)
        assert "100 of 100 points are yours" in capsys.readouterr().out
        silent_bugs.scoreboard()
    assert shown == [
        f"{BEGIN - HINT * hints} of 600 points: watched the loss. Next, from 200: on call. The upright lines "
        "are par."
    ]
    assert list(progress.read()["silent_bugs"]) == ["case_1"]
    silent_bugs.lesson.exercises["case_1"].hints_given = 0


def test_another_case_is_one_of_the_rest_and_the_same_for_a_number() -> None:
    with mock.patch.object(Case, "show"):
        drawn = [silent_bugs.another(seed) for seed in (7, 7, 8)]
    assert drawn[0].name == drawn[1].name != drawn[2].name
    assert not {case.name for case in drawn} & {case.name for case in CASES.values()}


# A page takes three to six seconds: some are tried with the deep tests, the others with the planted mistakes.
PAGES = [
    pytest.param(name, marks=pytest.mark.faults if i % 3 else pytest.mark.deep)
    for i, name in enumerate(collection())
]
# Pages have the same training once their mistakes are mended. One page stands for each training.
TRAININGS = {(it.rung, it.on, it.model, it.rows, it.options): name for name, it in collection().items()}
FIRST = {rung: name for (rung, *_), name in reversed(TRAININGS.items())}
RIGHT = [
    pytest.param(name, marks=pytest.mark.deep if name in FIRST.values() else pytest.mark.faults)
    for name in TRAININGS.values()
]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_refused_as_it_is(name: str) -> None:
    mistake = collection()[name]
    with pytest.raises(WrongAnswer):
        hunting._tried(mistake, mistake.source(), np.random.default_rng())


@pytest.mark.parametrize("name", RIGHT)
def test_every_page_is_right_without_its_mistake(name: str) -> None:
    mistake = collection()[name]
    assert hunting._tried(mistake, replace(mistake, diff="").source(), np.random.default_rng())
