"""Checks of lesson 2: what a vector unit reads, and a systolic array tick by tick."""

from __future__ import annotations

from typing import Any

import numpy as np

from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, compare, parts, wrong
from checks.support.words import described
from minidist.kernels.systolic import SystolicArray
from minidist.kernels.systolic import compare as counts_of

lesson = Lesson(2, "cpu_gpu_tpu")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution


@lesson.exercise(
    "2.1",
    hints=(
        "Begin with one row of c, and one p. How many instructions does it take to go along the row, if "
        "each does `lanes` elements of it? 10 elements with 4 lanes: three.",
        "A row of c takes n / lanes instructions for each p, rounded up; there are m rows, and p has k "
        "values. Each instruction reads one element of a. Of b, each multiply-add reads its own: m n k.",
        "instructions = m * k * -(-n // lanes), where -(-n // lanes) is n / lanes rounded up; then return "
        "instructions, instructions + m * n * k",
    ),
)
def vector_cost(answer: Answer, draw: np.random.Generator) -> Right:
    """Instructions and reads of a product on a vector unit."""
    cases = [
        (2, 10, 3, 8),
        (1, 1, 1, 1),
        (1, 4, 1, 4),
        (1, 8, 1, 4),
        (1, 5, 1, 4),
        (2, 3, 4, 1),
        (3, 2, 5, 16),
    ]
    cases += [
        (*(int(size) for size in draw.integers(1, 500, 3)), int(draw.choice([2, 4, 8, 16]))) for _ in range(8)
    ]
    for m, n, k, lanes in cases:
        _, right = counts_of(m, n, k, lanes=lanes).rows
        got = several(answer, 2, "the instructions and the reads", m, n, k, lanes)
        call = f"vector_cost({m}, {n}, {k}, {lanes})"
        compare(got[0], right.cycles, f"The first number of {call}, the instructions,", rtol=1e-12, atol=0)
        reads = right.a_reads + right.b_reads
        wrongs = {
            "That leaves out the elements of a.": right.b_reads,
            "That reads a for each multiply-add: one element of a serves all lanes.": 2 * m * n * k,
            "That fills all lanes: the last piece of a row reads what it has.": right.cycles * (lanes + 1),
        }
        compare(got[1], reads, f"The second number of {call}, the reads,", 1e-12, 0, wrongs=wrongs)
    return Right(len(cases))


@lesson.exercise(
    "2.2",
    hints=(
        "Write the result for [[1, 2], [3, 4]] on paper: two rows, three columns. Where does each row of x "
        "begin?",
        "Begin with zeros of shape (m, m + k - 1), of x's dtype. Row i of x goes to row i, from column i to "
        "column i + k.",
        "entering = np.zeros((m, m + k - 1), x.dtype), then for i in range(m): entering[i, i : i + k] = "
        "x[i], then return entering.",
    ),
)
def skew(answer: Answer, draw: np.random.Generator) -> Right:
    """Row i is i places late, with zeros around it."""
    shapes = [(2, 3), (1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (5, 5)]
    shapes += [(int(m), int(k)) for m, k in draw.integers(2, 12, (6, 2))]
    for m, k in shapes:
        x = whole_numbers(draw, (m, k))
        shown = f" [{', '.join(str(row.tolist()) for row in x)}]" if x.size < 7 else ""
        compare(answer(x.copy()), skewed(x), f"What skew makes of {m} x {k} elements{shown}")
        halves = x + 0.5
        compare(answer(halves.copy()), skewed(halves), f"What skew makes of {m} x {k} elements with halves")
    return Right(len(shapes))


def skewed(x: np.ndarray) -> np.ndarray:
    """Row i after i zeros, and so many zeros after it that all rows are equally long."""
    last = len(x) - 1
    return np.stack([np.pad(row, (i, last - i)) for i, row in enumerate(x)])


@lesson.exercise(
    "2.3",
    hints=(
        "Do it in three moves: a, then b, and only then the arithmetic. Which column of the old a is the new "
        "column 1?",
        "The new a[:, 1:] is the old a[:, :-1], and the new a[:, 0] is left. For b it is rows in place of "
        "columns, and top. np.column_stack([left, a[:, :-1]]) and np.vstack([top, b[:-1]]) put such pieces "
        "together.",
        "a = np.column_stack([left, a[:, :-1]]), then b = np.vstack([top, b[:-1]]), then sums = sums + a "
        "* b, then return a, b, sums.",
    ),
)
def systolic_step(answer: Answer, draw: np.random.Generator) -> Right:
    """One tick alone, and then a whole product."""
    shapes = [(2, 3), (1, 1), (1, 3), (3, 1), (2, 2), (4, 2)]
    shapes += [(int(rows), int(cols)) for rows, cols in draw.integers(2, 8, (4, 2))]
    for rows, cols in shapes:
        a, b, sums = (whole_numbers(draw, (rows, cols)) for _ in range(3))
        left, top = (whole_numbers(draw, (size,)) + 100 for size in (rows, cols))
        right_a = np.concatenate([left[:, None], a[:, :-1]], axis=1)
        right_b = np.concatenate([top[None], b[:-1]])
        arguments = [each.copy() for each in (a, b, sums, left, top)]
        got = several(answer, 3, "a, b and sums", *arguments)
        where = f"On {rows} x {cols} PEs, after one tick, "
        back = {
            "The last column has come back on the left: it leaves, and `left` comes.": np.roll(a, 1, axis=1)
        }
        compare(got[0], right_a, f"{where}a, which moves right,", wrongs=back)
        compare(got[1], right_b, f"{where}b, which moves down,")
        wrongs = {
            "That multiplies what the PEs held before the move.": sums + a * b,
            "These are the products alone: add them to sums.": right_a * right_b,
        }
        compare(got[2], sums + right_a * right_b, f"{where}sums", wrongs=wrongs)
    for rows, cols, k in ((2, 2, 3), (3, 4, 2)):
        x, y = whole_numbers(draw, (rows, k)), whole_numbers(draw, (k, cols))
        compare(
            whole_product(answer, x, y),
            SystolicArray(rows, cols, "output_stationary").matmul(x, y).c,
            f"After all ticks of a product of {rows} x {k} and {k} x {cols}, sums",
        )
    return Right(len(shapes) + 2)


@lesson.exercise(
    "2.4",
    hints=(
        "There are three parts: what enters, tick by tick; a grid of zeros; a loop that calls step. For the "
        "loop: when does the last PE, in the corner at the lower right, get its last pair?",
        "Take left = skew(x) and top = skew(y.T).T. In tick t, column t of left and row t of top enter. The "
        "last pair enters after k - 1 ticks, and takes m + n - 2 more to PE (m - 1, n - 1): that makes m + "
        "n + k - 2 ticks with tick 0. For these ticks left needs n - 1 more columns of zeros, and top needs "
        "m - 1 more rows.",
        "left = np.pad(skew(x), ((0, 0), (0, n - 1))), then top = np.pad(skew(y.T).T, ((0, m - 1), (0, 0))), "
        "then a, b, sums = (np.zeros((m, n), x.dtype) for _ in range(3)), then for t in range(m + n + k - 2)"
        ": a, b, sums = step(a, b, sums, left[:, t], top[t]), then return sums.",
    ),
)
def systolic_matmul(answer: Answer, draw: np.random.Generator) -> Right:
    """A product on the grid, with its ticks counted."""
    shapes = [(2, 3, 4), (1, 1, 1), (1, 1, 3), (2, 1, 1), (1, 3, 1), (2, 2, 2), (4, 2, 3)]
    shapes += [(int(m), int(n), int(k)) for m, n, k in draw.integers(2, 9, (5, 3))]
    tally = Tally()
    for m, n, k in shapes:
        x, y = whole_numbers(draw, (m, k)), whole_numbers(draw, (k, n))
        grid = Grid(m, n)
        got = answer(x.copy(), y.copy(), grid.step)
        sizes = f"product of {m} x {k} and {k} x {n}"
        if grid.ticks == 0:
            wrong(f"For the {sizes} step was never called: the grid is to do the work.")
        ran = f", after {grid.ticks} tick{'s' * (grid.ticks > 1)},"
        right = SystolicArray(m, n, "output_stationary").matmul(x, y).c
        compare(got, right, f"The {sizes}{ran}")
        if not np.array_equal(grid.held[2], right):
            wrong(
                f"The {sizes}{ran} is right, but the grid has not computed it: the sums that step returned "
                "last are something else. Feed x and y into the grid, and return its sums."
            )
        if min(m, n, k) > 1:  # on a single PE one tick more would be twice par
            idea = "the last PE begins m + n - 2 ticks late, and works for k"
            tally.add("Ticks", grid.ticks, m + n + k - 2, idea)
    return Right(len(shapes), tally.scores)


class Grid:
    """m x n PEs that count their ticks."""

    def __init__(self, m: int, n: int) -> None:
        self.m, self.n, self.ticks = m, n, 0
        self.held = [np.zeros((m, n), int)] * 3  # a, b and sums after the last tick

    def step(self, a: Any, b: Any, sums: Any, left: Any, top: Any) -> tuple[Any, Any, Any]:
        """As systolic_step, with a sentence for what does not fit."""
        needed = {"a": (self.m, self.n), "b": (self.m, self.n), "sums": (self.m, self.n)}
        needed |= {"left": (self.m,), "top": (self.n,)}
        for (what, shape), given in zip(needed.items(), (a, b, sums, left, top), strict=True):
            if np.shape(given) != shape:
                wrong(
                    f"In tick {self.ticks} step was given a wrong {what}, on {self.m} x {self.n} PEs.",
                    f"  expected the shape {shape}",
                    f"  got      the shape {np.shape(given)}",
                )
        for what, given, held in zip(("a", "b", "sums"), (a, b, sums), self.held, strict=True):
            if not np.array_equal(given, held):
                wrong(
                    f"In tick {self.ticks}, step was not given the {what} that the PEs hold.",
                    "  They begin with zeros, and numbers come in through left and top alone: give step "
                    "what it returned in the tick before.",
                )
        self.ticks += 1
        a = np.concatenate([np.asarray(left)[:, None], np.asarray(a)[:, :-1]], axis=1)
        b = np.concatenate([np.asarray(top)[None], np.asarray(b)[:-1]])
        self.held = [a, b, sums + a * b]
        return a.copy(), b.copy(), self.held[2].copy()


@lesson.exercise(
    "2.5",
    hints=(
        "Which PE is the last to begin, and how many ticks does it wait for its first pair? How many "
        "multiply-adds does it then do? The animation has m = n = k = 3, and takes 7.",
        "PE (m - 1, n - 1) is m - 1 rows and n - 1 columns from the corner: it begins m + n - 2 ticks late "
        "and does k multiply-adds, one in a tick. Each element of both matrices enters once. The product "
        "needs m n k multiply-adds, and the grid could do m n in each tick.",
        "ticks = m + n + k - 2, then reads = m * k + k * n, then return ticks, reads, m * n * k / (m * n * "
        "ticks)",
    ),
)
def systolic_cost(answer: Answer, draw: np.random.Generator) -> Right:
    """Ticks, reads and utilisation, as the array of minidist counts them."""
    cases = [(2, 5, 4), (1, 1, 1), (2, 1, 1), (1, 1, 4), (3, 3, 3), (4, 3, 1)]
    cases += [(*(int(size) for size in draw.integers(1, 300, 3)),) for _ in range(10)]
    for m, n, k in cases:
        counts = SystolicArray(m, n, "output_stationary").counts(m, n, k)
        ticks = counts.cycles - m  # without the ticks in which m rows of sums leave
        got = several(answer, 3, "the ticks, the reads and the utilisation", m, n, k)
        call = f"systolic_cost({m}, {n}, {k})"
        late = {
            "That is the time of one PE: the last one begins m + n - 2 ticks later.": k,
            "That is two ticks too many: PE (0, 0) works from the first tick on.": m + n + k,
        }
        compare(got[0], ticks, f"The first number of {call}, the ticks,", rtol=1e-12, atol=0, wrongs=late)
        taken = {"That counts what each PE takes: an element enters once, and is handed on.": 2 * m * n * k}
        compare(got[1], m * k + k * n, f"The second number of {call}, the reads,", 1e-12, 0, wrongs=taken)
        compare(got[2], k / ticks, f"The third number of {call}, the utilisation,", rtol=1e-9, atol=0)
    return Right(len(cases))


def whole_numbers(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers from 1 on, so that sums are exact; no two are alike."""
    size = int(np.prod(shape))
    return draw.permutation(np.arange(1, size + 10))[:size].reshape(shape)


def whole_product(answer: Answer, x: np.ndarray, y: np.ndarray) -> Any:
    """The sums after all ticks, with an element of x in each row as late as the row is deep."""
    (m, k), n = x.shape, y.shape[1]
    a, b, sums = (np.zeros((m, n), int) for _ in range(3))
    for t in range(m + n + k - 2):
        left = np.array([x[i, t - i] if 0 <= t - i < k else 0 for i in range(m)])
        top = np.array([y[t - j, j] if 0 <= t - j < k else 0 for j in range(n)])
        a, b, sums = answer(a, b, sums, left, top)
    return sums


def several(answer: Answer, count: int, what: str, *args: Any) -> tuple[Any, ...]:
    """So many things that an answer returns, or a sentence if it returns anything else."""
    got = answer(*args)
    call = f"{answer.name}({', '.join(map(described, args))})"
    if got is None:
        wrong(f"{call} is None: does the function end with return?")
    if len(parts(got)) != count:
        number = {2: "two", 3: "three"}[count]
        wrong(
            f"{answer.name} should return {number} things, {what}, with commas between them; it returned "
            f"{described(got)}."
        )
    return tuple(got)
