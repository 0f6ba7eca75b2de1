"""Checks of lesson 3: a guard, the sectors of a load, the index that goes first, a grid-stride loop."""

from __future__ import annotations

import numpy as np

from checks.kernels import in_float64, run
from checks.support.diagnosis import of_product
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Score, compare, wrong
from checks.support.words import number

lesson = Lesson(3, "cuda_from_python")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

NEIGHBOURS = "let neighbouring threads read neighbouring elements"


def whole_numbers(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Random whole numbers from 1 to 99 as float32: sums of a few hundred are exact in any order."""
    return draw.integers(1, 100, shape).astype(np.float32)


def unwritten(*shape: int) -> np.ndarray:
    """What nobody has written to yet: NaN."""
    return np.full(shape, np.nan, np.float32)


def _elements(count: int, blocks: int, threads: int) -> str:
    return f"{_many(count, 'element')} and {_many(blocks, 'block')} of {threads} threads"


def _many(count: int, what: str) -> str:
    return f"{number(count)} {what}{'s' * (count != 1)}"


@lesson.exercise(
    "3.1",
    hints=(
        "Begin as double does: which element is this thread's? And what does it do if there is none?",
        "i = cuda.grid(1) is the thread's number among all of the grid. The last block may have threads "
        "beyond the end: i < z.size says whether this one has an element.",
        "i = cuda.grid(1), then under `if i < z.size:` the line z[i] = x[i] + y[i]. Nothing is returned.",
    ),
)
def add(answer: Answer, draw: np.random.Generator) -> Right:
    """A thread adds an element."""
    cases = [(n, threads) for n in (33, 1, 32, 100, int(draw.integers(200, 900))) for threads in (32, 64)]
    counts = None
    for n, threads in [*cases, (1024, 256)]:
        blocks = -(-n // threads)
        x, y, z = whole_numbers(draw, n), whole_numbers(draw, n), unwritten(n)
        says = _elements(n, blocks, threads)
        inputs = x.copy(), y.copy()
        counts = run(answer, says, blocks, threads, x, y, z)
        compare(z, inputs[0] + inputs[1], f"With {says}, z", before=np.nan)
        compare(x, inputs[0], f"With {says}, x, which should stay as it was,")
        compare(y, inputs[1], f"With {says}, y, which should stay as it was,")
    assert counts is not None
    reads, writes = (asked / 4 / 1024 for asked in (counts.total.load_bytes, counts.total.store_bytes))
    scores = (
        Score("Reads for each element", reads, 2, "read x[i] and y[i] once each"),
        Score("Writes for each element", writes, 1, "write z[i] once"),
        Score(
            "Loads of a warp for 32 elements",
            counts.total.loads / 32,
            2,
            "let every thread add an element, its own: i = cuda.grid(1), and no loop",
        ),
    )
    return Right(len(cases) + 1, scores)


@lesson.exercise(
    "3.2",
    hints=(
        "In which sector does the byte at address 70 lie? Sectors have 32 bytes, and the first begins at 0.",
        "Thread t's address is first + t * stride, and its sector is that // 32. Several threads may have "
        "the same sector: how do you count different ones?",
        "A set holds each value once: len({(first + t * stride) // 32 for t in range(32)}).",
    ),
)
def sectors(answer: Answer, draw: np.random.Generator) -> Right:
    """How many sectors a warp's load touches."""
    cases = [(0, 4), (0, 8), (0, 32), (0, 0), (0, 128), (4, 4), (28, 4), (0, 12), (124, -4), (4096, 4096)]
    for _ in range(12):
        cases.append((4 * int(draw.integers(0, 500)), 4 * int(draw.integers(0, 20))))
    for first, stride in cases:
        different = np.unique((first + np.arange(32) * stride) // 32)
        if_first_is_0 = len(np.unique(np.arange(32) * stride // 32))
        wrongs = {"That is the number with first = 0: it matters where sectors begin.": if_first_is_0}
        answer.expect(len(different), first, stride, wrongs=wrongs)
    return Right(len(cases))


@lesson.exercise(
    "3.3",
    hints=(
        "j, i = cuda.grid(2) gives this thread's place in x and in y. Which of the two should count columns, "
        "so that a warp, whose threads are neighbours in x, walks along a row?",
        "The thread at column j and row i computes c[i, j]: the sum over p of a[i, p] * b[p, j], if there is "
        "such an element. Add up in a variable of your own, which begins as float32(0), and write it once.",
        "Under `if i < c.shape[0] and j < c.shape[1]:` let total = float32(0), then `for p in "
        "range(a.shape[1]): total += a[i, p] * b[p, j]`, and at last c[i, j] = total.",
    ),
)
def matmul(answer: Answer, draw: np.random.Generator) -> Right:
    """A thread computes an element of the product, and a warp walks along rows."""
    sizes = [(2, 3, 4), (1, 1, 1), (3, 2, 1), (8, 32, 5), (33, 9, 7), (4, 4, 0)]
    sizes += [tuple(int(s) for s in draw.integers(2, 50, 3)) for _ in range(2)] + [(64, 64, 16)]
    counts = None
    for m, n, k in sizes:
        side = max(m, n)
        a, b, c = whole_numbers(draw, m, k), whole_numbers(draw, k, n), unwritten(m, n)
        says = f"a of {m} x {k} and b of {k} x {n}"
        counts = run(answer, says, (-(-side // 32), -(-side // 8)), (32, 8), a, b, c)
        compare(c, a @ b, f"With {says}, c", before=np.nan, story=of_product(a, b))
    assert counts is not None
    reads, writes = (asked / 4 / 64**2 for asked in (counts.total.load_bytes, counts.total.store_bytes))
    once = "add up in a variable of your own, and write c[i, j] once"
    scores = (
        Score("Sectors for each load of a warp", counts.sectors_per_load, 2.5, NEIGHBOURS),
        Score(
            "Sectors for each store",
            counts.sectors_per_store,
            4,
            "let neighbouring threads write along a row",
        ),
        Score("Reads of each thread for k = 16", reads, 32, once),
        Score("Writes", writes, 1, once),
        Score(
            "Loads of a warp for 32 sums",
            counts.total.loads / (64**2 / 32),
            32,
            "give every thread one element of c, its own",
        ),
    )
    return Right(len(sizes), scores + in_float64(answer.function, a, b, c))


@lesson.exercise(
    "3.4",
    hints=(
        "With 4 threads and 10 elements, thread 0 may take elements 0, 4 and 8. Which does thread 1 take?",
        "Thread i begins at element i. Its next element is as far on as there are threads in the whole "
        "grid, cuda.gridsize(1). range(start, stop, step) does just that.",
        "total = float32(0), then `for i in range(cuda.grid(1), x.size, cuda.gridsize(1)): total += x[i]`, "
        "and after the loop partial[cuda.grid(1)] = total.",
    ),
)
def sums(answer: Answer, draw: np.random.Generator) -> Right:
    """Each thread adds up its share of x."""
    cases = [(5, 1, 32), (32, 1, 32), (100, 1, 32), (100, 2, 32), (64, 2, 32), (1, 2, 32)]
    cases += [(int(draw.integers(200, 2000)), 3, 64), (4096, 2, 128)]
    counts = None
    for n, blocks, threads in cases:
        x, partial = whole_numbers(draw, n), unwritten(blocks * threads)
        says = _elements(n, blocks, threads)
        kept = x.copy()
        counts = run(answer, says, blocks, threads, x, partial)
        compare(x, kept, f"With {says}, x, which should stay as it was,")
        missing = np.flatnonzero(np.isnan(partial))
        if missing.size:
            those = "element of partial was" if missing.size == 1 else "elements of partial were"
            wrong(f"With {says}, {missing.size} {those} never written, first partial[{missing[0]}].")
        many = blocks * threads
        by_block = sum(float(kept[t::threads].sum()) for t in range(many))
        wrongs = {
            "Each thread has taken one element: it goes on by the number of threads.": float(
                kept[:many].sum()
            ),
            "Some elements are in several shares: go on by cuda.gridsize(1), all threads.": by_block,
            "The elements after the last full round are in no share.": float(kept[: n // many * many].sum()),
        }
        total = float(kept.sum(dtype=np.float64))
        got = float(partial.sum(dtype=np.float64))
        compare(got, total, f"With {says}, the sum of partial", wrongs=wrongs)
    assert counts is not None
    scores = (
        Score("Sectors for each load of a warp", counts.sectors_per_load, 4, NEIGHBOURS),
        Score(
            "Loads of a warp for 32 elements",
            counts.total.loads / (n / 32),
            1,
            "let all threads share the elements, and none of them add up more than its part",
        ),
    )
    return Right(len(cases), scores + in_float64(answer.function, x, partial))
