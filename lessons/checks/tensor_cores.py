"""Checks of lesson 6: where a fragment's elements lie, mma.sync, ldmatrix, rounding, a bound, tiles."""

from __future__ import annotations

import operator

import numpy as np

from checks import tile_units
from checks.cuda_from_python import unwritten
from checks.kernels import run
from checks.support.diagnosis import of_product
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Score, compare, wrong
from minidist.kernels.emulator.arithmetic.fragments import MMA

lesson = Lesson(6, "tensor_cores")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

LAYOUT = MMA["m16n8k16", 16]  # the emulator's own, by which it executes the instruction
LANES = 32


def places(operand: str) -> np.ndarray:
    """(lanes, elements, 2): row and column of each lane's elements of "a", "b" or "c", by the emulator."""
    fragment = getattr(LAYOUT, operand)
    rows, columns = fragment.shape
    numbers = np.arange(rows * columns).reshape(1, rows, columns)
    return np.stack(np.divmod(fragment.spread(numbers).T, columns), axis=-1)


@lesson.exercise(
    "6.1",
    hints=(
        "Go through lane 0's elements 0 to 7 in the picture and write down the rows, then the columns. Which "
        "of them change with i % 2, which with i // 2 % 2, which with i // 4? Then look at lane 5.",
        "Elements come in pairs, side by side: i % 2. The second pair of each four is 8 rows further down: "
        "i // 2 % 2. And the last four are 8 columns further right: i // 4. Lane 0 begins at [0, 0], and any "
        "lane at [g, 2 t].",
        "g, t = lane // 4, lane % 4; return g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)",
    ),
)
def element_of_a(answer: Answer, draw: np.random.Generator) -> Right:
    """The map of A's fragment."""
    expected = places("a")
    order = [(0, i) for i in range(8)] + [(lane, 0) for lane in range(LANES)]
    order += [(lane, i) for lane in draw.permutation(LANES).tolist() for i in range(8)]
    for lane, i in order:
        _pair(answer, expected[lane, i], lane, i)
    return Right(8 * LANES)


def _pair(answer: Answer, expected: np.ndarray, *args: int) -> None:
    """A row and a column, compared."""
    got = answer(*args)
    call = f"{answer.name}({', '.join(map(str, args))})"
    try:
        row, column = got
        found = operator.index(row), operator.index(column)
    except (TypeError, ValueError):
        wrong(f"{call} should be two whole numbers, (row, column).", f"  got      {got!r}")
    right = tuple(expected.tolist())
    if (row, column) != right:
        wrong(
            f"{call} is wrong.", f"  expected row {right[0]}, column {right[1]}", f"  got      {_said(found)}"
        )


def _said(place: tuple[int, int]) -> str:
    return f"row {place[0]}, column {place[1]}"


@lesson.exercise(
    "6.2",
    hints=(
        "One round of the loop takes 16 elements of each row, which are 8 words. Register r of a lane holds "
        "elements 2 r and 2 r + 1, side by side: one word. So ask your element_of_a(lane, 2 r) where it is.",
        "Register 0 of A is the word of row g and columns 2 t, 2 t + 1: a[i0 + g, w + t], where w is the "
        "first word of this round. Register 1 is 8 rows down, 2 is 4 words (8 columns) on, 3 is both. "
        "A row of b is a *column* of B: register 0 is b[j0 + g, w + t], register 1 is 4 words on.",
        "for w in range(0, a.shape[1], 8): fragment_a[0] = a[i0 + g, w + t]; [1]: a[i0 + g + 8, w + t]; [2]: "
        "a[i0 + g, w + t + 4]; [3]: a[i0 + g + 8, w + t + 4]; fragment_b[0] = b[j0 + g, w + t]; [1]: "
        "b[j0 + g, w + t + 4]; mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0). At the end, for r in "
        "range(4): c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = sums[r]",
    ),
)
def tensor_matmul(answer: Answer, draw: np.random.Generator) -> Right:
    """A product by mma.sync, from words of two float16."""
    sizes = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 0)]
    sizes += [tuple(int(s) for s in draw.integers(2, 5, 3)), (2, 3, 4)]
    for down, across, deep in sizes:
        m, n, k = 16 * down, 8 * across, 16 * deep
        a, b = _halves(draw, m, k), _halves(draw, n, k)  # b transposed
        c = unwritten(m, n)
        says = f"a of {m} x {k} and b of {k} x {n}"
        counts = run(answer, says, (across, down), LANES, a.view(np.uint32), b.view(np.uint32), c)
        right = a.astype(np.float32) @ b.astype(np.float32).T
        compare(c, right, f"With {says}, c", before=np.nan, story=of_product(a, b.T))
    products = down * across * deep
    scores = (
        Score(
            "Matrix instructions for each 16 x 8 x 16", counts.total.matrix / products, 1, "one does it all"
        ),
        Score(
            "Loads of a warp for each of them",
            counts.total.loads / products,
            6,
            "a word holds two elements that belong side by side: 4 loads of a, and 2 of b",
        ),
    )
    return Right(len(sizes), scores)


def _halves(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Whole numbers from 1 to 9 in float16: their products and sums are exact."""
    return draw.integers(1, 10, shape).astype(np.float16)


@lesson.exercise(
    "6.3",
    hints=(
        "Lanes 0 to 7 give rows 0 to 7 of the first matrix, which is A's upper left quarter. Lanes 8 to 15 "
        "give the rows of the second one, which register 1 gets. Which quarter is that?",
        "The quarters come in the order of the registers: upper left, lower left, upper right, lower right. "
        "So lanes 0 to 15 give rows 0 to 15 at column 0. And lanes 16 to 31?",
        "return lane % 16, lane // 16 * 8",
    ),
)
def row_for_ldmatrix(answer: Answer, draw: np.random.Generator) -> Right:
    """The addresses that ldmatrix takes."""
    for lane in range(LANES):
        matrix, row = divmod(lane, 8)
        corner = places("a")[0, 2 * matrix]  # lane 0's first element in this register
        _pair(answer, corner + np.array([row, 0]), lane)
    return Right(LANES)


@lesson.exercise(
    "6.4",
    hints=(
        "How would you round 0.0123456 to three significant *decimal* digits? Move the point until three "
        "digits stand before it, round to a whole number, and move it back. Now with powers of two.",
        "np.frexp(x) gives fraction and exponent with x = fraction * 2**exponent, fraction from 1/2 to 1. "
        "fraction * 2**bits then has `bits` bits before the point. np.round rounds ties to even.",
        "fraction, exponent = np.frexp(x); return np.ldexp(np.round(np.ldexp(fraction, bits)), "
        "exponent - bits)",
    ),
)
def rounded(answer: Answer, draw: np.random.Generator) -> Right:
    """Round to so many significant bits."""
    cases = [([1.0, 2.0, -3.0, 0.0], 8), ([1 / 3, 0.7], 8), ([2049.0, 0.00123], 11), ([-1 / 3], 11)]
    # Half way between two neighbours: to the even one. And close below 2: carries.
    cases += [([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8], 8), ([1.9999, 255.9], 8), ([3e38, 1e-30], 8)]
    # The last is 2^-16 below 256: its logarithm, in float32, is that of 256.
    cases += [([1 / 3, 1e5], 24), ([0.3, 7.0], 1), ([256 - 2.0**-16], 24)]
    for _ in range(12):
        x = draw.standard_normal(6) * 10.0 ** draw.integers(-6, 7)
        cases.append((x.tolist(), int(draw.integers(2, 25))))
    for values, bits in cases:
        x = np.array(values, np.float32)
        fraction, exponent = np.frexp(x.astype(np.float64))
        scaled = np.ldexp(fraction, bits)
        away = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
        wrongs = {
            "That cuts off: round to the nearest.": np.ldexp(np.trunc(scaled), exponent - bits),
            "Half way between two numbers that rounds away from 0: take the even one.": np.ldexp(
                away, exponent - bits
            ),
        }
        answer.expect(_to_bits(x, bits), x, bits, rtol=0, atol=0, wrongs=wrongs)
    matrix = draw.standard_normal((3, 5)).astype(np.float32)
    answer.expect(_to_bits(matrix, 11), matrix, 11, rtol=0, atol=0)
    return Right(len(cases) + 1)


def _to_bits(x: np.ndarray, bits: int) -> np.ndarray:
    """The same by the bits of a float32: add half of what is kept last, less one where that is even; cut."""
    drop = 24 - bits
    if drop == 0:
        return x.copy()
    words = x.view(np.uint32).astype(np.uint64)
    words += (1 << (drop - 1)) - 1 + (words >> drop & 1)
    return (words >> drop << drop).astype(np.uint32).view(np.float32)


@lesson.exercise(
    "6.5",
    hints=(
        "Follow one product a[i, p] * b[p, j] from the beginning. How often is it rounded, alone or within a "
        "sum, before it is part of the result? And by which factor at most each time?",
        "a[i, p] and b[p, j] are rounded once each: a factor of 1 + 2**-bits for each of the two. Then come "
        "k additions, each of which rounds to 24 bits: 1 + 2**-24, k times. All terms are positive, so the "
        "sum is off by no larger factor than its terms.",
        "return (1 + 2.0**-bits) ** 2 * (1 + 2.0**-24) ** k - 1",
    ),
)
def error_bound(answer: Answer, draw: np.random.Generator) -> Right:
    """A bound on the relative error."""
    cases = [(8, 1), (11, 1), (11, 16), (8, 4096), (24, 1), (24, 100), (11, 0)]
    cases += [
        (int(bits), int(k))
        for bits, k in zip(draw.integers(2, 25, 8), draw.integers(1, 10**6, 8), strict=True)
    ]
    for bits, k in cases:
        factor, term = np.log1p(2.0**-bits), np.log1p(2.0**-24)
        right = np.expm1(2 * factor + k * term)
        with np.errstate(over="ignore"):
            wrongs = {
                "That rounds one factor, and a product has two.": np.expm1(factor + k * term),
                "That rounds the factors in each addition: they are rounded once.": np.expm1(
                    k * (2 * factor + term)
                ),
                "That is the factor by which it is too large: less 1, it is the fraction.": right + 1,
                "That rounds the sums to `bits` bits: they have the 24 of float32.": np.expm1(
                    (k + 2) * factor
                ),
                "That leaves out the roundings of the sum.": np.expm1(2 * factor),
            }
        answer.expect(float(right), bits, k, rtol=1e-4, atol=1e-13, wrongs=wrongs)
    return Right(len(cases))


@lesson.exercise(
    "6.6",
    hints=(
        "How many multiply-adds does one core do in a cycle? How many FLOPs is that? And how many cores are "
        "there, and how many cycles in a second?",
        "An m x k matrix times a k x n matrix takes m n k multiply-adds, each of which is two FLOPs.",
        "return 2 * m * n * k * cores * multiprocessors * clock",
    ),
)
def tensor_core_peak(answer: Answer, draw: np.random.Generator) -> Right:
    """FLOP/s of all tensor cores."""
    cases = [(1, 1, 4, 4, 4, 1.0), (84, 4, 4, 4, 4, 1.5e9), (80, 8, 4, 4, 4, 1.53e9), (2, 3, 8, 4, 16, 1e9)]
    cases += [
        (*(int(size) for size in draw.integers(2, 100, 5)), float(draw.integers(1, 30)) * 1e8)
        for _ in range(8)
    ]
    for multiprocessors, cores, m, n, k, clock in cases:
        right = 2.0 * m * n * k * cores * multiprocessors * clock
        answer.expect(right, multiprocessors, cores, m, n, k, clock, rtol=1e-9, atol=0)
    return Right(len(cases))


@lesson.exercise(
    "6.7",
    hints=(
        "Begin with m = n = k = 32: configure, four loads, four products, four stores, release. Where in "
        "a, in b in pairs and in c does each of the tiles begin?",
        "Rows p to p + 31 of b are rows p / 2 to p / 2 + 15 in pairs, and column j is at 2 j there. So "
        "tile 6 is loaded from [p // 2, 2 * j], and tile 7 from [p // 2, 2 * j + 32]. Tile t of the sums "
        "goes to c from row i + 16 * (t // 2) and column j + 16 * (t % 2) on. For larger sizes: loops over"
        " i and j in steps of 32; zero the sums; a loop over p; stores.",
        "b = in_pairs(b); unit.configure(16); for i in range(0, m, 32): for j in range(0, n, 32): [zero 0 "
        "to 3; for p in range(0, k, 32): load(4, a, i, p), load(5, a, i + 16, p), load(6, b, p // 2, 2 * "
        "j), load(7, b, p // 2, 2 * j + 32), multiply 0 to 3; store(t, c, i + 16 * (t // 2), j + 16 * (t %"
        " 2)) for t from 0 to 3]; unit.release()",
    ),
)
def tile_matmul(answer: Answer, draw: np.random.Generator) -> Right:
    """A product by the tiles of a model of AMX."""
    sizes = [(32, 32, 32), (32, 32, 64), (32, 64, 32), (64, 32, 32), (64, 96, 64)]
    for m, n, k in sizes:
        a, b = (draw.integers(1, 10, shape).astype(np.float32) for shape in ((m, k), (k, n)))
        given = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in (a, b)]
        kept, c, unit = (
            [each.copy() for each in given],
            np.full((m, n), np.nan, np.float32),
            tile_units.Tiles(),
        )
        answer(unit, *given, c)
        where = f"With a of {m} x {k} and b of {k} x {n}"
        mistakes = tile_units.mistakes(a, b)
        compare(c, a @ b, f"{where}, c", before=np.nan, story=of_product(a, b), wrongs=mistakes)
        answer.unchanged(f"{where} it", [unit, *kept], [unit, *given])
        if not unit.counts.released:
            wrong(
                f"{where}, c is right, but the tiles are not released.",
                "  Until then Linux saves 8 kB more whenever it switches threads: end with unit.release().",
            )
    blocks = m * n / 32**2  # of the last
    twice = "load tiles 4 to 7, then multiply four times: each loaded tile serves two products"
    scores = (
        Score("Loads for each 32 x 32 x 32", unit.counts.loads / (blocks * k / 32), 4, twice),
        Score(
            "Stores for each 32 x 32 of c",
            unit.counts.stores / blocks,
            4,
            "keep the sums in tiles 0 to 3 for the whole loop over p, and store them after it",
        ),
    )
    return Right(len(sizes), scores)
