"""What a check says: a sentence or a few short lines in the reader's terms, and never a traceback.

IPython asks an exception how it wants to be shown (`_render_traceback_`); these show their message alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from checks.support.diagnosis import Story, in_common, suspected
from checks.support.words import a_kind_of, around, as_array, digits_for, number

SLACK = 1.5
"""Times par that an answer may cost and still pass: above that, the exercise's idea is missing."""


class Verdict(Exception):
    """Shown in a notebook as its message."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class NotAnswered(Verdict):
    """The stub is still a stub."""


class WrongAnswer(Verdict):
    """The answer is wrong; the message says where, what was expected, and what came."""


class NeedsMore(Verdict, ImportError):
    """A package is missing that a lesson needs."""


class Interrupted(Verdict):
    """The reader stopped a check: Kernel, Interrupt."""


@dataclass(frozen=True)
class Score:
    """What an answer cost, against par."""

    what: str  # "Bytes sent by each rank"
    cost: float
    par: float
    idea: str = ""  # how par is reached, said where the cost is above it: "send parts, not the whole"
    unit: str = ""
    slack: float = SLACK

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.what}: {number(self.cost)}{unit} (par {number(self.par)})."

    @property
    def over(self) -> bool:
        """Above par, by more than rounding."""
        return self.cost > self.par * (1 + 1e-9)

    @property
    def far_over(self) -> bool:
        """Above `slack` times par: such an answer does not pass. Where par is 0, that is any cost."""
        return self.cost > self.par * self.slack * (1 + 1e-9)


class Tally:
    """Costs of many runs; of each kind the largest that is above par is told, or else the largest."""

    def __init__(self) -> None:
        self._worst: dict[str, Score] = {}

    def add(self, what: str, cost: float, par: float, idea: str = "", unit: str = "") -> None:
        """Take in one cost, as `Score` has it."""
        new = Score(what, cost, par, idea, unit)
        old = self._worst.get(what)
        if old is None or _excess(new) > _excess(old):
            self._worst[what] = new

    @property
    def scores(self) -> tuple[Score, ...]:
        """One for each kind of cost."""
        return tuple(self._worst.values())


def _excess(score: Score) -> tuple[bool, bool, float]:
    return score.far_over, score.over, score.par


@dataclass(frozen=True)
class Right:
    """A check's good news."""

    inputs: int  # how many were tried
    scores: tuple[Score, ...] = ()
    remark: str = ""
    points: int | None = None  # of a game

    @property
    def at_par(self) -> bool:
        """No cost is above par."""
        return not any(score.over for score in self.scores)

    def too_dear(self) -> str:
        """Which idea is missing where a cost is far above par; empty where none is."""
        return "\n".join(
            f"Every result is right, and the idea is missing: {score.what[0].lower()}{score.what[1:]}: "
            f"{number(score.cost)}{' ' * bool(score.unit)}{score.unit}, where par is {number(score.par)}."
            + (f"\n  Try this: {score.idea}." if score.idea else "")
            for score in self.scores
            if score.far_over
        )

    def __str__(self) -> str:
        first = f"Right on {self.inputs} inputs." if self.inputs > 1 else "Right."
        lines = [" ".join([first, *map(str, self.scores), *([self.remark] if self.remark else [])])]
        lines += [
            f"It passes, above par in {score.what[0].lower()}{score.what[1:]}"
            + (f": {score.idea}." if score.idea else ".")
            for score in self.scores
            if score.over
        ]
        return "\n".join(lines)


def wrong(*lines: str) -> NoReturn:
    """End a check: the answer is wrong, and these lines say how."""
    raise WrongAnswer("\n".join(lines))


def unlike(says: str, expected: Any, got: Any, how: str = "") -> NoReturn:
    """End a check: a value is wrong; below the sentence stand the right one, what came, and how."""
    wrong(says, f"  expected {expected}", f"  got      {got}", *([f"  {how}"] if how else []))


def not_none(got: Any, what: str) -> None:
    """WrongAnswer where a function has returned nothing."""
    if got is None:
        wrong(f"{what} is None: does the function end with return?")


def compare(
    got: Any,
    expected: Any,
    what: str,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    before: Any = None,
    story: Story | None = None,
    wrongs: Mapping[str, Any] | None = None,
) -> None:
    """WrongAnswer where `got` is not `expected`: of another kind, shape or dtype, or with another element.

    Of elements that are wrong it says what they have in common (`checks/support/diagnosis.py`).

    Args:
        got: what the reader's function gave: a number, an array or a tensor.
        expected: the same, right.
        what: names it in the message: "rank 1's result", "the product".
        rtol, atol: as numpy.testing.assert_allclose; NaN equals nothing.
        before: what an array held before the answer wrote to it: a number, or an array.
        story: says why, from all that came and the place of the first wrong element, where it knows.
        wrongs: what wrong answers give that are known, by the sentences that say so.
    """
    not_none(got, what)
    right = as_array(expected)
    try:
        mine = as_array(got)
    except (TypeError, ValueError, RuntimeError):  # as of a list of tensors that have a gradient
        wrong(f"{what} is a {type(got).__name__}, and should be {a_kind_of(expected)}.")
    if mine.dtype.kind in "OUSc":
        wrong(f"{what} is a {type(got).__name__}, and should be {a_kind_of(expected)}.")
    if mine.shape != right.shape:
        should = f"have {right.shape}" if right.ndim else "be one number"
        wrong(f"{what} has the shape {mine.shape}, and should {should}.")
    if right.dtype.kind == "f" and mine.dtype.kind == "f" and right.dtype != mine.dtype:
        if not isinstance(expected, (int, float)):
            wrong(f"{what} is {mine.dtype}, and should be {right.dtype}.")
        rtol = max(rtol, 4 * float(np.finfo(mine.dtype).eps))  # a number is a number, of whatever width
    good = np.isclose(mine, right, rtol=rtol, atol=atol)
    if good.all():
        return
    first = tuple(int(i) for i in np.argwhere(~good)[0])
    wanted, found = right[first].item(), mine[first].item()
    known = suspected(wrongs or {}, story, rtol, atol)(mine, first)
    how = known or in_common(mine, right, good, before, what)
    if right.ndim == 0:
        digits = digits_for(wanted, found, least=4)
        unlike(f"{what} is wrong.", number(wanted, digits), number(found, digits), how)
    digits = digits_for(wanted, found)
    place = f"element {first[0]}" if right.ndim == 1 else f"element {list(first)}"
    what = f"{what} is wrong from {place} on ({int((~good).sum())} of {right.size} elements)."
    if right.ndim == 1:
        unlike(what, around(right, first[0], digits), around(mine, first[0], digits), how)
    unlike(what, f"{wanted:.{digits}g} there", f"{found:.{digits}g}", how)


def same(one: Any, other: Any) -> bool:
    """Equal to the bit: numbers, words, arrays, tensors, lists of such; anything else counts as equal."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "dtype") and hasattr(other, "dtype"):
        return np.array_equal(as_array(one), as_array(other), equal_nan=as_array(one).dtype.kind == "f")
    if isinstance(one, (int, float, str)):
        return bool(one == other or one != one)
    return True


def parts(value: Any) -> tuple[Any, ...]:
    """What a function returns that should return several things; an empty tuple where it is not several."""
    if isinstance(value, (tuple, list)) or (isinstance(value, np.ndarray) and value.ndim == 1):
        return tuple(value)
    return ()
