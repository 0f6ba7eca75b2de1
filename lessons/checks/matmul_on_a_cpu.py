"""Checks of lesson 1: a matrix product in loops, and what each order of them reads, writes and fetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from checks.support.answers import as_python
from checks.support.counted import Cache, Counted
from checks.support.diagnosis import of_product
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, compare, wrong

lesson = Lesson(1, "matmul_on_a_cpu")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

LINES = 24
"""Of the cache that counts: far fewer than the rows of the matrices that it is tried with."""
SHAPES = ((2, 3, 2), (1, 3, 2), (2, 1, 5), (3, 4, 2), (1, 1, 1), (0, 2, 3), (2, 0, 3), (2, 3, 0))
"""m, k and n; sums of nothing are 0."""
GARBAGE = 777
"""What c holds before."""
Shape = tuple[int, int, int]


@lesson.exercise(
    "1.1",
    hints=(
        "Say the definition aloud: element (i, j) of c is a sum over p. So there is a loop over i, one over "
        "j, and inside of them one over p.",
        "Begin the sum for each (i, j) with 0, in a variable: then c is written once for each element, and "
        "never read.",
        "for i in range(m): for j in range(n): total = 0.0; for p in range(k): total += a[i, p] * b[p, j]; "
        "and after that loop c[i, j] = total.",
    ),
)
def matmul_loops(answer: Answer, draw: np.random.Generator) -> Right:
    """Fill c with the product: one sum for each element."""
    tally = Tally()
    shapes = [*SHAPES, ragged(draw), (4, 5, 3)]
    for m, k, n in shapes:
        a, b, c, _ = product(answer, draw, (m, k, n))
        if k > 3:
            _accesses(tally, a, b, c, (m, k, n), reads=2, writes=1 / k)
    compiles(answer, draw, shapes[-1])
    return Right(len(shapes), tally.scores)


@lesson.exercise(
    "1.2",
    hints=(
        "A multiplication and an addition are two FLOPs. How many of each does one element of c take, and "
        "how many elements are there?",
        "There are 2 m k n FLOPs. At the least, a and b are read once and c is written once: m k + k n + m n "
        "elements of itemsize bytes.",
        "return 2 * m * k * n / (itemsize * (m * k + k * n + m * n))",
    ),
)
def intensity(answer: Answer, draw: np.random.Generator) -> Right:
    """FLOPs for each byte that has to be moved at the least."""
    tried = 0
    shapes = [
        (2, 3, 4),
        (1, 1, 1),
        (1, 8, 1),
        (4, 1, 4),
        (64, 64, 64),
        *(ragged(draw, 2000) for _ in range(8)),
    ]
    for m, k, n in shapes:
        for itemsize in (2, 4, 8):
            right = 2 * m * k * n / (itemsize * (m * k + k * n + m * n))
            without = 2 * m * k * n / (itemsize * (m * k + k * n))
            wrongs = {"That leaves out c, which is written once.": without}
            answer.expect(right, m, k, n, itemsize, rtol=1e-9, wrongs=wrongs)
            tried += 1
    return Right(tried)


@lesson.exercise(
    "1.3",
    hints=(
        "The innermost loop decides which elements are touched one after the other. With p innermost they "
        "lie in a column of b. With which index innermost do they lie in a row of b, and in a row of c?",
        "The order i, p, j. Then no sum is complete before the loop over p is, so the sums have to be kept "
        "in c itself: set it to 0 first.",
        "c[:] = 0; for i in range(m): for p in range(k): factor = a[i, p]; for j in range(n): "
        "c[i, j] += factor * b[p, j]",
    ),
)
def matmul_rows(answer: Answer, draw: np.random.Generator) -> Right:
    """The product with rows of b and c in the inner loop."""
    tally = Tally()
    shapes = [*SHAPES, ragged(draw), ragged(draw)]
    for shape in shapes:
        product(answer, draw, shape)
    idea = (
        "j is in the innermost loop, as it should be; take i in the outermost, so that a row of c stays in "
        "the cache until it is complete"
    )
    fetched_at_par(answer, draw, tally, (6, 48, 48), (), idea)
    compiles(answer, draw, shapes[-1])
    return Right(len(shapes) + 1, tally.scores)


@lesson.exercise(
    "1.4",
    hints=(
        "The inner three loops stay as in matmul_rows, but p only goes over one block: from p0 to p0 + size. "
        "Outside of them is a loop over p0.",
        "range(0, k, size) gives the beginnings, and min(p0 + size, k) the end: the last block may be "
        "smaller. The loop over all i is inside the loop over p0: all rows of a use a block before the next.",
        "c[:] = 0; for p0 in range(0, k, size): for i in range(m): for p in range(p0, min(p0 + size, k)): "
        "factor = a[i, p]; for j in range(n): c[i, j] += factor * b[p, j]",
    ),
)
def matmul_blocks(answer: Answer, draw: np.random.Generator) -> Right:
    """The product, one block of rows of b after the other."""
    tally = Tally()
    shapes = [*SHAPES, ragged(draw), ragged(draw)]
    for shape in shapes:
        product(answer, draw, shape, (int(draw.integers(1, 5)),))
    idea = "use a block of b for all rows of a before the next: the loop over i inside of that over p0"
    fetched_at_par(answer, draw, tally, (48, 48, 16), (16,), idea)
    compiles(answer, draw, shapes[-1], (4,))
    return Right(len(shapes) + 1, tally.scores)


@lesson.exercise(
    "1.5",
    hints=(
        "Take i in steps of 2 and p in steps of 4. Before the loop over j, read the 2 x 4 elements of a into "
        "eight variables: a00 to a13.",
        "In the loop over j read the four elements of b below each other into four variables. Each of them "
        "is used twice: for row i of c and for row i + 1.",
        "for i in range(0, m, 2): for p in range(0, k, 4): a00, ..., a13 = a[i, p], ..., a[i + 1, p + 3]; "
        "for j in range(n): b0, b1, b2, b3 = b[p, j], ..., b[p + 3, j]; "
        "c[i, j] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3; the same for c[i + 1, j]. And c[:] = 0 first.",
    ),
)
def matmul_tile(answer: Answer, draw: np.random.Generator) -> Right:
    """The product with 2 x 4 elements of a in registers."""
    tally = Tally()
    shapes = [(2, 4, 3), (2, 4, 1), (4, 4, 0), (2, 8, 2), (4, 8, 5)]
    shapes += [(2 * int(draw.integers(1, 5)), 4 * int(draw.integers(2, 4)), int(draw.integers(9, 20)))]
    for m, k, n in shapes:
        a, b, c, _ = product(answer, draw, (m, k, n))
        if n > 8:
            # Of each 2 x 4 x n block: 8 of a, 4 n of b, 2 n of c read; 2 n of c written, and once the zeros.
            idea = "read each element of b once for two rows of c, and add four products to c at once"
            reads, writes = (8 + 6 * n) / (8 * n), 1 / 4 + 1 / k
            _accesses(tally, a, b, c, (m, k, n), reads, writes, idea)
    compiles(answer, draw, shapes[-1])
    return Right(len(shapes), tally.scores)


def ragged(draw: np.random.Generator, largest: int = 12) -> Shape:
    """Random sizes, from 2."""
    m, k, n = (int(size) for size in draw.integers(2, largest, 3))
    return m, k, n


def matrices(draw: np.random.Generator, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two random matrices without a 0, and one for the product that is full of something else."""
    m, k, n = shape
    a, b = (draw.integers(1, 10, size).astype(np.float32) for size in ((m, k), (k, n)))
    return a, b, np.full((m, n), GARBAGE, np.float32)


def product(
    answer: Answer,
    draw: np.random.Generator,
    shape: Shape,
    more: Sequence[int] = (),
    lines: int | None = None,
) -> tuple[Counted, Counted, Counted, Cache]:
    """Run the answer on matrices that count, compare, and return those and their cache."""
    if as_python(answer.function) is not answer.function:
        wrong("Write it without @njit: its reads are counted in Python, and the lesson compiles it below.")
    m, k, n = shape
    cache = Cache(LINES)
    values = matrices(draw, shape)
    kept = [each.copy() for each in values[:2]]
    a, b, c = (Counted(each, cache) for each in values)
    answer(a, b, c, *more)
    sizes = "".join(f", size {each}" for each in more)
    what = f"The product of {m} x {k} and {k} x {n}{sizes}, in c,"
    compare(c.values, kept[0] @ kept[1], what, before=GARBAGE, story=of_product(*kept))
    for letter, before, after in zip("ab", kept, values[:2], strict=True):
        compare(after, before, f"{letter}, which should stay as it was,")
    return a, b, c, cache


def _accesses(
    tally: Tally,
    a: Counted,
    b: Counted,
    c: Counted,
    shape: Shape,
    reads: float,
    writes: float,
    idea: str = "",
) -> None:
    """Reads and writes for each multiply-add, against par."""
    work = shape[0] * shape[1] * shape[2]
    if work:
        idea = idea or "keep the sum in a variable, and write it to c once"
        tally.add("Reads per multiply-add", (a.reads + b.reads + c.reads) / work, reads, idea)
        tally.add("Writes per multiply-add", c.writes / work, writes, idea)


def fetched_at_par(
    answer: Answer, draw: np.random.Generator, tally: Tally, shape: Shape, more: Sequence[int], idea: str
) -> None:
    """Cache lines that the answer has fetched, against those of the solution with the same matrices.

    `idea` is what an answer misses that does walk along the rows of b.
    """
    _, b, _, cache = product(answer, draw, shape, more)
    if b.along < b.reads / 2:
        idea = "walk along rows: j in the innermost loop"
    best = Answer(answer.name, lesson.solution(answer.name))
    par = product(best, draw, shape, more)[3]
    m, k, n = shape
    tally.add(f"Cache lines fetched for {m} x {k} x {n}", cache.fetched, par.fetched, idea)


def compiles(answer: Answer, draw: np.random.Generator, shape: Shape, more: Sequence[int] = ()) -> None:
    """Numba compiles the answer, too, and the result is right."""
    import numba

    a, b, c = matrices(draw, shape)
    try:
        fast: Callable[..., Any] = numba.njit(answer.function)
        fast(a, b, c, *more)
    except numba.core.errors.NumbaError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        wrong(
            "Python runs it, but Numba cannot compile it; use plain loops, numbers, and elements of a, b, c.",
            f"  Numba says: {lines[1] if len(lines) > 1 else lines[0]}",
        )
    compare(
        c,
        a @ b,
        f"Compiled by Numba, the product of {shape[0]} x {shape[1]} and {shape[1]} x {shape[2]}, in c,",
        before=GARBAGE,
    )
