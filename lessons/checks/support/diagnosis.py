"""What the wrong elements of an array have in common: a factor, a difference, what was there before.

`compare` in `verdicts.py` puts the sentence below the right value and the one that came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checks.support.words import as_array, number


def in_common(got: np.ndarray, right: np.ndarray, good: np.ndarray, before: Any, what: str) -> str:
    """Return the sentence, or nothing where the elements have nothing so simple in common.

    Args:
        got, right: arrays of one shape.
        good: which elements of them are close to each other.
        before: what `got` held before the answer wrote to it, a number or an array; None where it was new.
        what: names the result; where it counts things ("3 ranks"), a factor is told by them.
    """
    if got.dtype.kind not in "fiu" or right.dtype.kind not in "fiu" or "should stay as it was" in what:
        return ""
    bad = ~good
    x, y = got[bad].astype(np.float64), right[bad].astype(np.float64)
    every = "It" if x.size == 1 else "Every element" if not right[good].any() else "Each of these"
    with np.errstate(all="ignore"):
        if before is not None:
            was = np.broadcast_to(as_array(before), right.shape)[bad].astype(np.float64)
            if found := _of_before(x, y, was):
                return found
        if x.size > 1 and not x.any():
            return f"{every} is 0."
        factor = x / y
        if _alike(factor):
            return _as_factor(factor[0], every, what)
        if x.size > 1 and _alike(x - y):
            less = x[0] < y[0]
            return f"{every} is {number(abs(x[0] - y[0]))} too {'small' if less else 'large'}."
    if good.any() and right.ndim < 2:
        return ""
    if right.ndim == 2 and right.shape[0] == right.shape[1] and np.allclose(got, right.T):
        return "Rows and columns are exchanged: it is the transpose."
    if len(np.unique(y)) > 2 and np.allclose(np.sort(x), np.sort(y)):
        return "The numbers are right, and in other places."
    return ""


Story = Callable[[np.ndarray, tuple[int, ...]], str]
"""Why a result is wrong, from all of it and the place of its first wrong element; nothing if not known."""


def suspected(wrongs: Mapping[str, Any], others: Story | None, rtol: float, atol: float) -> Story:
    """Say which of these wrong answers' results came, or what `others` says."""

    def story(got: np.ndarray, first: tuple[int, ...]) -> str:
        for sentence, result in wrongs.items():
            known = as_array(result)
            if known.shape in ((), got.shape) and np.allclose(got, known, rtol, atol):
                return sentence
        return others(got, first) if others else ""

    return story


def of_product(a: np.ndarray, b: np.ndarray) -> Story:
    """For `compare`: which products a wrong result of a @ b has in each sum."""

    def story(got: np.ndarray, first: tuple[int, ...]) -> str:
        k, x, y = a.shape[1], a.astype(np.float64), b.astype(np.float64)
        if k < 65 and np.isfinite(got).all():
            for begin, end in ((i, j) for i in range(k) for j in range(i + 1, k + 1) if j - i < k):
                if np.allclose(got, x[:, begin:end] @ y[begin:end]):
                    those = f"{begin} is" if end - begin == 1 else f"{begin} to {end - 1} are"
                    return f"Of the {k} products in each sum, 0 to {k - 1}, only {those} there."
        whole = x @ y
        for sums in (np.cumsum(whole), np.cumsum(whole, 1), np.cumsum(whole, 0)):
            if got.size and np.allclose(got, sums.reshape(got.shape)):
                return "Each sum goes on from the one before it: begin each with 0."
        return ""

    return story


def _of_before(x: np.ndarray, y: np.ndarray, was: np.ndarray) -> str:
    there = f"{number(was[0])} was there before" if _alike(was) else "These numbers were there before"
    if np.isnan(was).all():
        both = "nan was there before: nothing is written there, or the result is added to it."
        return both if np.isnan(x).all() else ""
    if np.allclose(x, was):
        return f"{there}: nothing is written there."
    if was.any() and np.allclose(x, y + was):
        return f"{there}, and the result is added to it: begin with 0."
    return ""


def _alike(numbers: np.ndarray) -> bool:
    """Whether all are one number, finite and not 0, but for rounding."""
    first = numbers[0]
    return bool(np.isfinite(first) and first and np.allclose(numbers, first, rtol=1e-5, atol=0))


def _as_factor(factor: float, every: str, what: str) -> str:
    """A factor in words. A single number has one in any case: it is told only where it is a whole one."""
    if abs(factor + 1) < 1e-5:
        return f"{every} has the wrong sign."
    times, size = (factor, "large") if abs(factor) > 1 else (1 / factor, "small")
    is_whole = abs(times - round(times)) < 1e-4 * abs(times)
    if abs(times) < 1.01 or (every == "It" and (not is_whole or abs(times) > 100)):
        return ""
    shown = number(round(abs(times)) if is_whole else abs(times))
    sign = " and has the wrong sign" if factor < 0 else ""
    things = re.findall(rf"\b{shown} ((?!elements)[a-z]+s)\b", what)
    as_many = f", and there are {shown} {things[0]}" if things else ""
    return f"{every} is {shown} times too {size}{sign}{as_many}."
