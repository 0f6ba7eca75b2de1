"""What all lessons share: stubs are seen, verdicts are readable, hints come in order, progress is kept."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

import minidist as md
from checks import figures, ranks
from checks.ranks import Case, on_ranks
from checks.support import answers, progress
from checks.support.animations import Scene
from checks.support.answers import Answer
from checks.support.catalogue import TITLES
from checks.support.counted import Cache, Counted
from checks.support.exercises import Lesson
from checks.support.unanswered import is_unanswered
from checks.support.verdicts import (
    Interrupted,
    NeedsMore,
    NotAnswered,
    Right,
    Score,
    Tally,
    Verdict,
    WrongAnswer,
    compare,
)
from checks.support.words import number
from minidist import comm
from tests.lessons import LESSONS


@pytest.fixture(autouse=True)
def _own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDIST_LESSONS_PROGRESS", str(tmp_path / "progress.json"))


def a_lesson(cost: float = 3, par: float = 2) -> Lesson:
    lesson = Lesson(8, "ranks_that_talk")

    @lesson.exercise("8.9", hints=("first", "second", "third"))
    def double(answer: Answer, draw: np.random.Generator) -> Right:
        x = float(draw.integers(1, 1000))
        answer.expect(2 * x, x)
        return Right(1, (Score("Steps", cost, par, "do less"),))

    return lesson


def double(x):
    return 2 * x


def told(says: str, function: Any, *args: Any, kind: type[Verdict] = WrongAnswer, **options: Any) -> str:
    """What a reader is told, and nothing else is shown, where a call ends in this kind of verdict."""
    with pytest.raises(kind, match=says) as found:
        function(*args, **options)
    assert found.value._render_traceback_() == [str(found.value)]
    return str(found.value)


def test_stubs_are_seen_without_a_call() -> None:
    def dots(x):
        """Say something."""
        ...  # about 2 lines

    def half_done(x):
        y = x + 1
        for _ in range(3):
            ...
        return y

    def no_text(x):
        """Nothing but words."""

    class Model:
        def forward(self, x): ...

    assert [is_unanswered(each) for each in (dots, half_done, no_text, Model)] == [True] * 4

    def index(x):
        return x[..., 0]

    def on_purpose(x):
        pass

    class Whole:
        def forward(self, x):
            return x

    assert [is_unanswered(each) for each in (index, on_purpose, Whole, double)] == [False] * 4

    class Compiled:
        def __init__(self, function):
            self.py_func = function

    assert is_unanswered(Compiled(dots))
    assert not is_unanswered(Compiled(double))


def test_a_check_passes_scores_and_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    lesson = a_lesson()
    lesson.check(double)
    assert capsys.readouterr().out == "Right. Steps: 3 (par 2).\nIt passes, above par in steps: do less.\n"
    assert list(progress.read()["ranks_that_talk"]) == ["double"]
    assert lesson.or_solution(double) is double
    assert capsys.readouterr().out == ""


def test_points_are_all_at_par_and_two_thirds_above() -> None:
    assert a_lesson().check(double, points=3) == 2
    assert a_lesson(2, 2).check(double, points=3) == 3
    told("where par is 2", a_lesson(4, 2).check, double, points=3)


def test_an_answer_that_costs_more_than_half_again_as_par_does_not_pass() -> None:
    assert told("where par is", a_lesson(3.01, 2).check, double, seed=5) == (
        "Exercise 8.9, not yet. Every result is right, and the idea is missing: steps: 3.01, where par is "
        "2.\n"
        "  Try this: do less.\n(These inputs again: check(double, seed=5))"
    )
    assert progress.read() == {}
    told("where par is 0", a_lesson(1, 0).check, double)


def test_progress_tells_passed_from_at_par() -> None:
    a_lesson(3, 2).check(double)
    assert list(progress.read()["ranks_that_talk"]) == ["double"]
    assert progress.read("at_par") == {}
    a_lesson(2, 2).check(double)
    assert list(progress.read("at_par")["ranks_that_talk"]) == ["double"]
    a_lesson(3, 2).check(double)
    assert list(progress.read("at_par")["ranks_that_talk"]) == ["double"]  # it was, and stays so


def test_wrong_answers_are_told_in_a_few_lines() -> None:
    def double(x):
        return x

    with pytest.raises(WrongAnswer) as found:
        a_lesson().check(double, seed=5)
    assert found.value.__suppress_context__  # nothing else is shown above it
    shown = r"^Exercise 8\.9, not yet\. double\((.|\n)*  expected (.|\n)*  got      (.|\n)*"
    told(shown + r"\(These inputs again: check\(double, seed=5\)\)$", a_lesson().check, double, seed=5)
    assert progress.read() == {}


def grows(x):
    while True:
        x += 1


def suppresses(x):
    while True:
        with contextlib.suppress(Exception):
            x += 1


def swallows_everything(x):
    while True:
        try:
            while True:
                x += 1
        except:  # noqa: E722
            pass


@pytest.mark.parametrize("double", [suppresses, swallows_everything, numba.njit(grows)])
def test_an_endless_loop_ends(double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LIMIT", 0.1)
    monkeypatch.setattr(answers, "LOOK", 0.02)
    before = sys.gettrace()
    told(
        r"had not ended after 0 s and was stopped at line \d+ of your cell",
        a_lesson().judge,
        "double",
        double,
    )
    assert sys.gettrace() is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_list_that_grows_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = iter(range(0, 10**13, 10**9))
    monkeypatch.setattr(answers, "peak", lambda: next(peak))  # a GB more at each look
    monkeypatch.setattr(answers, "LOOK", 0.02)
    told(r"took 2 GB of memory and was stopped at line \d+ of your cell", a_lesson().judge, "double", grows)


def asks_for_more(x):
    numbers = [x]
    return numbers[3]


@pytest.mark.parametrize(
    ("failing", "says"),
    [
        (lambda x: [][int(x)], "raised IndexError"),
        (lambda x: sys.exit("enough"), "raised SystemExit: enough"),
        (lambda: 0, r"takes 0 positional arguments but 1 was given\n  at line \d+ .*lambda: 0"),
        (lambda x: int("x\n" * 9), r"invalid literal .{1,300}\n  at line"),
        (
            asks_for_more,
            r"IndexError: list index out of range\n  at line \d+ of your cell: return numbers\[3\]",
        ),
    ],
)
def test_an_exception_is_told_in_the_readers_terms(failing, says: str) -> None:
    assert str(LESSONS) not in told(says, a_lesson().judge, "double", failing)


def test_what_a_failing_call_printed_is_told_and_not_all_of_it() -> None:
    def double(x):
        print(2 * x)
        for _ in range(10**4):
            print("more")

    told(r"is None: .*\nThat call printed:\n  \d+\.0\n(  more\n){4}  \.\.\.\n", a_lesson().check, double)


def test_a_check_that_is_interrupted_says_where() -> None:
    def double(x):
        raise KeyboardInterrupt

    says = r"Exercise 8\.9: the check was interrupted, at line \d+ .*: raise Key"
    told(says, a_lesson().check, double, kind=Interrupted)
    with pytest.raises(Interrupted) as found:
        a_lesson().check(double)
    assert found.value.__suppress_context__
    assert progress.read() == {}


def test_an_answer_leaves_its_arguments_to_the_caller() -> None:
    def double(x, more):
        x *= 2
        return x

    def first(many):
        return many.pop()[0]

    expect, says = (
        Answer("double", double).expect,
        r"double\(\[1, 2\], 3\) returns what it should, but changes x, w",
    )
    told(says, expect, np.array([2.0, 4.0]), np.array([1.0, 2.0]), 3)
    told("changes x", expect, torch.tensor([2.0]), torch.tensor([1.0]), 3)
    told("changes many", Answer("first", first).expect, 1.0, [np.array([1.0])])


def test_a_lesson_with_kernels_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from minidist.kernels.cuda.runtime import device

    def missing() -> None:
        raise ImportError("numba-cuda is not installed: pip install 'minidist[cuda]'")

    monkeypatch.setattr(device, "require_toolkit", missing)
    again = importlib.util.spec_from_file_location("kernels_again", LESSONS / "checks" / "kernels.py")
    module, says = (
        importlib.util.module_from_spec(again),
        "takes no GPU: numba-cuda is not installed: pip .*restart",
    )
    told(says, again.loader.exec_module, module, kind=NeedsMore)


def test_numbers_that_differ_look_different() -> None:
    for right in (1 / 3, np.ones(1) / 3, np.ones((2, 2)) / 3):
        lines = told("x is wrong", compare, right + 1e-8, right, "x", rtol=1e-9, atol=0).splitlines()
        expected, given = (line.split()[1] for line in lines[1:3])
        assert expected != given


def test_a_function_of_another_name_or_none_is_no_exercise() -> None:
    def triple(x):
        return 3 * x

    told("no exercise triple; it has double", a_lesson().check, triple)
    told("write the function with def", a_lesson().check, lambda x: 2 * x)


def test_the_lessons_own_solution_is_nobodys_answer(capsys: pytest.CaptureFixture[str]) -> None:
    from checks.your_machine import lesson

    def add_cost(n, itemsize):
        return n, n

    own = lesson.or_solution(add_cost)
    assert "the lesson goes on with its own solution" in capsys.readouterr().out
    says = "add_cost is the lesson's own solution now.*run the cell with your answer"
    told(says, lesson.check, own, kind=NotAnswered)
    assert progress.read() == {}


def test_hints_come_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    lesson = a_lesson()

    def double(x): ...

    says = r"has no answer yet: write it in the cell above.*hint\(\) gives"
    told(says, lesson.check, double, kind=NotAnswered)
    for _ in range(4):
        lesson.hint()
    out = capsys.readouterr().out
    given = re.findall(r"hint \d of 3:\n\w+", out)
    third = "hint 3 of 3:\nthird"
    assert given == ["hint 1 of 3:\nfirst", "hint 2 of 3:\nsecond", third, third]
    assert "solutions/08_ranks_that_talk.py" in out


def test_progress_that_is_damaged_is_set_aside(capsys: pytest.CaptureFixture[str]) -> None:
    path = progress.file()
    path.write_text("{")
    assert progress.read() == {}
    assert "progress.json could not be read, is now progress.json.damaged" in capsys.readouterr().out
    assert path.with_name("progress.json.damaged").read_text() == "{"
    progress.note("topic", "exercise")
    assert list(json.loads(path.read_text())["passed"]["topic"]) == ["exercise"]


A_ROW = np.array([1, 2, 3], np.float32)


@pytest.mark.parametrize(
    ("got", "expected", "says"),
    [
        (None, A_ROW, r"x is None: does the function end with return\?"),
        ("words", A_ROW, "x is a str, and should be an array"),
        (np.zeros(2, np.float32), A_ROW, r"x has the shape \(2,\), and should have \(3,\)"),
        (np.array([1, np.nan, 3], np.float32), A_ROW, r"x is wrong from element 1 on \(1 of 3 elements\)"),
        (np.array([1.0, 2.0, 3.0]), A_ROW, "x is float64, and should be float32"),
        ([torch.ones(3, requires_grad=True)] * 2, A_ROW, "x is a list, and should be an array"),
        (torch.tensor([1.0, 2.0, 4.0]), A_ROW, r"2 on.*\n  expected \[1, 2, 3\]\n  got      \[1, 2, 4\]"),
        (2.0000001, 2.0, r"expected 2\n  got      2.0000001$"),
        (np.array([1.0, 2.0000001]), np.array([1.0, 2.0]), r"expected \[1, 2\]\n  got      \[1, 2.0000001\]"),
        ((1, 2), 1.0, r"has the shape \(2,\), and should be one number"),
        (1 + 2j, 1.0, "x is a complex, and should be a number"),
        (np.float32(0.3334), 1 / 3, "x is wrong"),
        (np.array([np.nan]), np.array([np.nan]), "x is wrong"),
    ],
)
def test_what_differs_is_named(got: object, expected: object, says: str) -> None:
    told(says, compare, got, expected, "x", rtol=1e-12, atol=0)


A_SQUARE = np.array([[1.0, 2], [3, 5]])


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (3 * A_ROW, "Every element is 3 times too large, and there are 3 ranks."),
        (A_ROW / 4, "Every element is 4 times too small."),
        (1.25 * A_ROW, "Every element is 1.25 times too large."),
        (-A_ROW, "Every element has the wrong sign."),
        (-2 * A_ROW, "Every element is 2 times too large and has the wrong sign."),
        (A_ROW + 5, "Every element is 5 too large."),
        (0 * A_ROW, "Every element is 0."),
        (A_ROW + 777, "777 was there before, and the result is added to it: begin with 0."),
        (0 * A_ROW + 777, "777 was there before: nothing is written there."),
        (A_ROW[[0, 2, 1]], None),
        (A_ROW[[2, 0, 1]], "The numbers are right, and in other places."),
        (A_ROW * [1, 3, 3], "Each of these is 3 times too large, and there are 3 ranks."),
        (A_ROW * [1, 1, 3], "It is 3 times too large, and there are 3 ranks."),
        (A_ROW * [1, 1, 1.1], None),
        (A_ROW + np.array([1, 2, 1]), None),
        (A_ROW * [1, np.nan, 3], None),
        (A_SQUARE.T, "Rows and columns are exchanged: it is the transpose."),
        (np.float64(14), "It is 2 times too large."),
        (np.float64(8), None),
    ],
)
def test_what_wrong_elements_have_in_common_is_told(got: np.ndarray, says: str | None) -> None:
    expected = {(3,): A_ROW, (2, 2): A_SQUARE, (): 7.0}[got.shape]
    got = got.astype(np.asarray(expected).dtype)
    with pytest.raises(WrongAnswer) as found:
        compare(got, expected, "On 3 ranks, x", before=777)
    assert str(found.value).split("\n  ")[3:] == ([says] if says else [])


def test_an_array_that_nothing_was_written_to_is_told() -> None:
    nan = np.full(3, np.nan, np.float32)
    told("nan was there before: nothing is written there", compare, nan, A_ROW, "x", before=nan)


def test_a_number_is_right_in_any_width() -> None:
    for third in (np.float32(1 / 3), np.float64(1 / 3)):
        compare(third, 1 / 3, "x", rtol=1e-9, atol=0)
    compare(torch.tensor([1.0, 2.0, 3.0]), A_ROW, "x")


def test_a_tally_tells_what_is_above_par() -> None:
    tally = Tally()
    for cost, par in ((1, 1), (100, 100), (30, 20)):
        tally.add("Bytes", cost, par)
    assert [(each.cost, each.par) for each in tally.scores] == [(30, 20)]
    assert [number(x) for x in (1200, 0.25, 3.0)] == ["1\u202f200", "0.25", "3"]


def test_counted_matrices_count() -> None:
    cache = Cache(lines=2, line=4)
    a = Counted(np.zeros((3, 4), np.float32), cache)
    a[0, 0], a[0, 3], a[1, 0], a[2, 0], a[0, 0]
    a[:] = 1
    assert (a.reads, a.writes) == (5, 12)
    assert cache.fetched == 4 + 3 - 1  # the line of row 0 is held when `a[:] = 1` begins
    with pytest.raises(WrongAnswer, match="one element at a time"):
        a[0]
    with pytest.raises(IndexError):
        a[3, 0]


def test_a_ladder_has_all_steps_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(
        figures, "show", lambda svg, caption, alt: shown.append(figures.framed(svg, caption, alt))
    )
    steps = len(TITLES)
    for lesson in range(steps):
        figures.ladder(lesson)
    assert all(text.count("<rect") == steps and "You are here: " in text for text in shown)
    assert f'role="img" aria-label="A staircase of {steps} steps' in shown[8]


def test_figures_are_right_on_light_and_dark() -> None:
    figure, axes = figures.draw()
    axes.plot([1, 2], [3, 4], color=figures.BLUE)
    figures.name(axes, 2, 4, "a line", figures.BLUE)
    text = figures.svg(figure)
    assert "currentColor" in text
    assert "a line</text>" in text  # letters, not outlines
    for stand_in in (figures.INK, figures.MUTED, figures.GRID):
        assert stand_in not in text.lower()
    assert "#000000" not in text
    assert "#ffffff" not in text.lower()


def test_an_animation_needs_nothing_from_elsewhere() -> None:
    scene = Scene(100, 50)
    scene.block("a", 10, 10, figures.BLUE)
    scene.frame("here </script>", {"a": (0, 0, "1")})
    scene.frame("there", {"a": (50, 0, "2", True)})
    text = scene.html("moves", "a block moves", 500)
    assert "http" not in text
    assert text.count("</script>") == 1
    assert 'aria-label="Play or pause"' in text
    assert "opacity: 1; transform: translate(0px, 0px)" in text  # as in the first frame, without scripts
    assert ">1</text></g>" in text


def dies(x):
    os._exit(3)


def raises(x):
    return [][md.rank()]


def spins(x):
    while md.rank() >= x:
        pass


def leaves(x):
    return comm.all_reduce(torch.ones(x)) if md.rank() == 0 and x == 3 else x


def never_waits(x):
    comm.all_reduce(torch.ones(3), async_op=True)
    return x


def a_generator(x):
    return (each for each in range(x))


def takes_two_gigabytes(x):
    return len(bytearray(1 << 31))


ONE = Case([(1,), (1,)], "2 ranks with one number")
ON_RANKS = [
    (dies, [ONE], r"On 2 ranks: rank . ended.*The next check has fresh ranks"),
    (
        raises,
        [ONE],
        r"On 2 ranks with one number, rank . raised IndexError.*\n  at line.*return \[\]\[md\.rank",
    ),
    (spins, [ONE], r"\n  rank 1 (i|wa)s at line \d+ of your cell: while md\.rank\(\) >= x"),
    (spins, [Case([(0,), (0,)])], r"had not ended after 1 s and was stopped.\n  rank 0 was at line \d+"),
    (
        leaves,
        [ONE, Case([(3,), (4,)], "the second case"), ONE],
        r"On the second case: (?!(.|\n)*barrier)(.|\n)*rank 1 has returned from its function",
    ),
    (never_waits, [ONE], r"rank 0 begins comm\.all_reduce and never waits"),
    (a_generator, [ONE], "what it returned cannot be sent back"),
]
if sys.platform.startswith("linux"):
    ON_RANKS += [(takes_two_gigabytes, [ONE], "raised MemoryError: it took more memory than a check gives")]


def test_what_goes_wrong_on_ranks_is_told_and_the_next_check_works() -> None:
    try:
        for function, cases, says in ON_RANKS:
            ranks.world(2).timeout = 1.0 if function is spins else ranks.LIMIT
            told(says, on_ranks, Answer(function.__name__, function), cases)
        assert on_ranks(Answer("own", lambda x: x), [ONE])[0].results == [1, 1]
    finally:
        ranks.close()


def test_an_interrupt_ends_a_check_on_ranks_and_the_next_one_works() -> None:
    lesson = Lesson(8, "ranks_that_talk")

    @lesson.exercise("8.9", hints=("first", "second", "third"))
    def slow(answer: Answer, draw: np.random.Generator) -> Right:
        return Right(len(on_ranks(answer, [ONE])))

    process = os.getpid()

    def runs_on(x):
        if md.rank() == 0:
            os.kill(process, signal.SIGINT)
        time.sleep(60)

    old = ranks.world(2).run(os.getpid)
    told(r"^Exercise 8\.9: the check was interrupted", lesson.judge, "slow", runs_on, kind=Interrupted)
    assert lesson.judge("slow", lambda x: x) == Right(1)
    assert not {*old} & {*ranks.world(2).run(os.getpid)}
