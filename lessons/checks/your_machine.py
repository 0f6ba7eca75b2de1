"""Checks of lesson 0: FLOPs and bytes of a sum and of a product, and the two limits of a roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, compare, parts, wrong
from checks.support.words import described

lesson = Lesson(0, "your_machine")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution


@lesson.exercise(
    "0.1",
    hints=(
        "Take n = 1: one element of x, one of y. How many additions are there? Which numbers travel, and in "
        "which direction?",
        "An element takes one addition. It moves three numbers: x and the old y come, the new y goes. Each "
        "has itemsize bytes.",
        "return n, 3 * n * itemsize",
    ),
)
def add_cost(answer: Answer, draw: np.random.Generator) -> Right:
    """FLOPs and bytes of y += x."""
    cases = [(5, 4), (1, 8), (1, 4), (0, 4)]
    cases += [(int(draw.integers(3, 10**6)), int(draw.choice([2, 4, 8]))) for _ in range(8)]
    for n, itemsize in cases:
        wrongs = {"That leaves out the new y, which goes back to memory.": 2 * n * itemsize}
        both(answer, (n, 3 * n * itemsize), n, itemsize, wrongs=wrongs)
    return Right(len(cases), remark="That was the first of many.")


@lesson.exercise(
    "0.2",
    hints=(
        "How many multiplications and additions does one element of c take, and how many elements does c "
        "have? For the bytes: how many elements have a, b and c together?",
        "An element of c takes 2 k FLOPs, and there are m n of them. a has m k elements, b has k n, and c "
        "has m n.",
        "flop = 2 * m * k * n, then moved = (m * k + k * n + m * n) * itemsize, then return flop, moved.",
    ),
)
def matmul_cost(answer: Answer, draw: np.random.Generator) -> Right:
    """FLOPs and bytes of a matrix product, each element moved once."""
    cases = [(2, 3, 4, 8), (1, 1, 1, 4), (1, 5, 1, 4), (3, 1, 2, 8), (4, 6, 1, 4), (64, 64, 64, 4)]
    cases += [
        (*(int(size) for size in draw.integers(2, 3000, 3)), int(draw.choice([2, 4, 8]))) for _ in range(8)
    ]
    for m, k, n, itemsize in cases:
        moved, each = (m * k + k * n + m * n) * itemsize, 3 * m * k * n * itemsize
        wrongs = {
            "That leaves out c, which is written.": (m * k + k * n) * itemsize,
            "That moves three numbers for each multiply-add, and each element moves only once.": each,
        }
        both(answer, (2 * m * k * n, moved), m, k, n, itemsize, wrongs=wrongs)
    return Right(len(cases))


@lesson.exercise(
    "0.3",
    hints=(
        "How many FLOP/s does the memory allow, if each byte that comes is good for `intensity` FLOPs?",
        "The memory allows bandwidth * intensity, the arithmetic allows peak. Whichever is lower decides. "
        "Python's min takes numbers; NumPy has a function that takes arrays as well.",
        "return np.minimum(peak, bandwidth * intensity)",
    ),
)
def attainable(answer: Answer, draw: np.random.Generator) -> Right:
    """The lower of two limits, for a number and for an array."""
    tried = 0
    for _ in range(4):
        bandwidth, ridge = float(draw.integers(10, 100)), float(draw.integers(2, 20))
        peak = bandwidth * ridge
        for intensity in (ridge / 4, ridge, ridge * 3, 0.0):
            divided = min(peak, bandwidth / intensity) if intensity else peak
            wrongs = {"That divides by the intensity: each byte is good for so many FLOPs.": divided}
            right = min(peak, bandwidth * intensity)
            answer.expect(right, peak, bandwidth, intensity, rtol=1e-9, wrongs=wrongs)
        several = np.array([0.0, ridge / 8, ridge / 2, ridge, ridge * 2, ridge * 9])
        answer.expect(np.minimum(peak, bandwidth * several), peak, bandwidth, several, rtol=1e-9)
        tried += 5
    return Right(tried)


@lesson.exercise(
    "0.4",
    hints=(
        "There are two times: how long does the arithmetic take, and how long does the moving? Both go on at "
        "once.",
        "The arithmetic takes flop / peak seconds, the moving takes moved / bandwidth. The longer of the two "
        "is the answer, and says what limits. Nothing has to be divided by flop or by moved.",
        "computing, moving = flop / peak, moved / bandwidth; if moving > computing: return moving, 'memory'; "
        "and else return computing, 'arithmetic'.",
    ),
)
def predict(answer: Answer, draw: np.random.Generator) -> Right:
    """The longer of two times, and which it is."""
    cases = [(800, 10, 100.0, 10.0), (100, 500, 100.0, 10.0), (200, 20, 100.0, 10.0)]
    cases += [(0, 500, 100.0, 10.0), (800, 0, 100.0, 10.0)]
    for _ in range(10):
        flop, moved = (int(count) for count in draw.integers(10**3, 10**9, 2))
        cases.append((flop, moved, float(draw.integers(10, 200)) * 1e9, float(draw.integers(5, 90)) * 1e9))
    for flop, moved, peak, bandwidth in cases:
        times = {"arithmetic": flop / peak, "memory": moved / bandwidth}
        limit = max(times, key=lambda kind: times[kind])  # of two that are equal the first
        got = pair(answer, "the seconds and a string", flop, moved, peak, bandwidth)
        call = f"{answer.name}({flop}, {moved}, {peak:g}, {bandwidth:g})"
        wrongs = {"That is the sum of both times, and both go on at once.": sum(times.values())}
        compare(got[0], times[limit], f"The time that {call} gives", rtol=1e-9, atol=0, wrongs=wrongs)
        if got[1] != limit:
            wrong(
                f"What {call} calls the limit is wrong: the arithmetic takes {times['arithmetic']:.4g} s, "
                f"the moving {times['memory']:.4g} s.",
                f"  expected {limit!r}",
                f"  got      {got[1]!r}",
            )
    return Right(len(cases))


def pair(answer: Answer, what: str, *args: Any) -> tuple[Any, Any]:
    """Two things that an answer returns, or a sentence if it returns anything else."""
    got = answer(*args)
    call = f"{answer.name}({', '.join(map(described, args))})"
    if got is None:
        wrong(f"{call} is None: does the function end with return?")
    if len(parts(got)) != 2:
        wrong(
            f"{call} should return two things, {what}, with a comma between them; it returned "
            f"{described(got)}."
        )
    return got[0], got[1]


def both(answer: Answer, expected: tuple[int, int], *args: Any, wrongs: Mapping[str, Any]) -> None:
    """FLOPs and bytes are as expected; `wrongs` are known numbers of bytes."""
    got = pair(answer, "the FLOPs and the bytes", *args)
    call = f"{answer.name}({', '.join(map(described, args))})"
    compare(got[0], expected[0], f"The first number of {call}, the FLOPs,", rtol=1e-12, atol=0)
    compare(got[1], expected[1], f"The second number of {call}, the bytes,", 1e-12, 0, wrongs=wrongs)
