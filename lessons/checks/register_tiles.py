"""Checks of lesson 5: loads for each multiply-add, a tile in registers, vector loads, a ring of slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from checks.cuda_from_python import unwritten, whole_numbers
from checks.kernels import in_float64, run, with_constants
from checks.shared_memory import barriers_of_a_warp
from checks.support.diagnosis import of_product
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Score, compare, wrong
from minidist.kernels.emulator.instructions.async_copies import AsyncCopies

lesson = Lesson(5, "register_tiles")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

PIECE = 512  # elements, in `ring_backwards`


@lesson.exercise(
    "5.1",
    hints=(
        "Take a thread with 2 x 3 sums, and one step of the sum over p. Which elements of a does it need, "
        "which of b? How many multiply-adds does it do with them?",
        "It needs one element of a for each of its rows, and one of b for each of its columns. Then it "
        "multiplies each element of a with each element of b.",
        "return (rows + columns) / (rows * columns)",
    ),
)
def loads_per_multiply_add(answer: Answer, draw: np.random.Generator) -> Right:
    """Loads from shared memory, as a formula."""
    shapes = [(2, 3), (1, 1), (2, 2), (1, 2), (3, 1), (4, 4), (8, 8), (8, 1)]
    shapes += [(int(r), int(c)) for r, c in draw.integers(1, 20, (10, 2))]
    for rows, columns in shapes:
        wrongs = {
            "That is the number for one sum: here each number serves several.": 2.0,
            "That is upside down: loads for each multiply-add.": rows * columns / (rows + columns),
        }
        answer.expect(1 / rows + 1 / columns, rows, columns, rtol=1e-9, atol=0, wrongs=wrongs)
    return Right(len(shapes))


@lesson.exercise(
    "5.2",
    hints=(
        "Between the barriers, for each of the DEPTH steps q: fill `column` and `row` from the tiles, and "
        "multiply each element of one with each of the other. Which rows of tile_a are this thread's?",
        "column[e] = tile_a[y + 16 * e, q] and row[e] = tile_b[q, x + 16 * e], for e in range(OWN). Use "
        "range(OWN) and range(DEPTH): loops whose length is a constant can be unrolled. After the loop over "
        "p, sums[e, f] belongs to row i0 + y + 16 * e and column j0 + x + 16 * f of c, where c has them.",
        "for q in range(DEPTH): [for e in range(OWN): the two lines above]; [for e in range(OWN): for f in "
        "range(OWN): sums[e, f] += column[e] * row[f]]. At the end, for all e and f: i, j = i0 + y + 16 * e, "
        "j0 + x + 16 * f; if i < c.shape[0] and j < c.shape[1]: c[i, j] = sums[e, f]",
    ),
)
def register_tile(answer: Answer, draw: np.random.Generator) -> Right:
    """The product, with OWN x OWN sums in each thread."""
    sizes = [(4, 2, 3, 4), (4, 1, 1, 1), (4, 64, 64, 16), (4, 17, 20, 33), (4, 5, 5, 0)]
    sizes += [(4, *(int(s) for s in draw.integers(2, 100, 3))), (2, 33, 50, 17), (4, 64, 64, 64)]
    kernels: dict[int, Answer] = {}
    for own, m, n, k in sizes:
        if own not in kernels:
            kernels[own] = _recompiled(answer, OWN=own, SIDE=16 * own)
        side = 16 * own
        a, b, c = whole_numbers(draw, m, k), whole_numbers(draw, k, n), unwritten(m, n)
        says = f"a of {m} x {k}, b of {k} x {n} and OWN = {own}"
        counts = run(kernels[own], says, (-(-n // side), -(-m // side)), (16, 16), a, b, c)
        compare(c, a @ b, f"With {says}, c", before=np.nan, story=of_product(a, b))
    multiply_adds = m * n * k / 32  # of warps, in the last of the sizes
    kinds = counts.instructions
    in_registers = (
        "let every index of sums, column and row be known when compiling: range(OWN), inside the loop over q"
    )
    scores = (
        Score(
            "Loads from shared memory for each multiply-add",
            kinds.get("load shared", 0) / multiply_adds,
            2 / own,
            "read OWN elements of each tile into column and row, and take all factors from there",
        ),
        Score(
            "Elements read from global memory",
            counts.total.load_bytes / 4,
            m * k * (n // side) + k * n * (m // side),
            "leave those reads to fetch, and take factors from tile_a and tile_b",
        ),
        Score(
            "Bank conflicts",
            counts.shared_conflicts,
            0,
            "let the threads of a warp read neighbours in tile_b: columns x, x + 16, x + 32, ...",
        ),
        Score("Accesses to local memory", _local(kinds), 0, in_registers),
    )
    return Right(len(sizes), scores + in_float64(kernels[own].function, a, b, c))


def _local(kinds: dict[str, int]) -> int:
    return kinds.get("load local", 0) + kinds.get("store local", 0)


def _recompiled(answer: Answer, **constants: int) -> Answer:
    kernel = answer.function
    return Answer(answer.name, with_constants(kernel, **constants)) if hasattr(kernel, "py_func") else answer


@lesson.exercise(
    "5.3",
    hints=(
        "Thread i has elements 4 i to 4 i + 3. Look at double_fours: it needs two local arrays here, one for "
        "four elements of x and one for four of y. And which threads have all of their four?",
        "if i + 4 <= x.size (with i = 4 * cuda.grid(1)): load four of x and four of y, add, store. Else a "
        "plain loop over range(i, x.size): the last one to three elements, and none for threads beyond them.",
        "load_128(four_x, 0, x, i); load_128(four_y, 0, y, i); for e in range(4): four_y[e] += alpha * "
        "four_x[e]; store_128(y, i, four_y, 0). Else: for e in range(i, x.size): y[e] += alpha * x[e]",
    ),
)
def axpy(answer: Answer, draw: np.random.Generator) -> Right:
    """y = alpha x + y, four elements a thread."""
    sizes = [4, 1, 2, 3, 128, 5, 127, 130, int(draw.integers(200, 2000)), 2048]
    for n in sizes:
        blocks = -(-n // 512)
        x, y, alpha = whole_numbers(draw, n), whole_numbers(draw, n), np.float32(draw.integers(2, 10))
        kept, old, right = x.copy(), y.copy(), y + alpha * x
        says = f"{n} element{'s' * (n > 1)} and {blocks} block{'s' * (blocks > 1)} of 128 threads"
        counts = run(answer, says, blocks, 128, alpha, x, y)
        compare(y, right, f"With {says}, y", before=old)
        compare(x, kept, f"With {says}, x, which should stay as it was,")
    per = n / 128
    idea = "load_128 and store_128 move four elements of a thread at once"
    scores = (
        Score("Loads of a warp for 128 elements", counts.total.loads / per, 2, idea),
        Score("Stores", counts.total.stores / per, 1, idea),
    )
    return Right(len(sizes), scores + in_float64(answer.function, alpha, x, y))


@lesson.exercise(
    "5.4",
    hints=(
        "Before the loop begin the copies of pieces 0 to SLOTS - 2, with a commit after each. In the loop: "
        "wait for this piece, barrier, begin the copy of the piece that is SLOTS - 1 further on, use this "
        "one. Piece p lies in slot p % SLOTS.",
        "cp_async_wait counts groups: PENDING = SLOTS - 2 of them may still be under way, those of the "
        "pieces after this one. That is right only where each round commits exactly one group, also when "
        "there is nothing left to copy. And a barrier has to follow the wait, before any thread reads or "
        "copies.",
        "In the loop over the pieces: cp_async_wait(PENDING); cuda.syncthreads(); ahead = piece + SLOTS - 1; "
        "if ahead < pieces: cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t); then "
        "cp_async_commit(), not within the if; then for i in range(t, PIECE, 128): y[piece * PIECE + i] = "
        "ring[piece % SLOTS * PIECE + PIECE - 1 - i]",
    ),
)
def ring_backwards(answer: Answer, draw: np.random.Generator) -> Right:
    """Pieces are copied ahead, into a ring of slots."""
    cases = [(3, 1), (3, 2), (3, 3), (3, 4), (4, 3), (4, int(draw.integers(4, 8))), (2, 5), (3, 9)]
    kernels: dict[int, Answer] = {}
    for slots, pieces in cases:
        if slots not in kernels:
            kernels[slots] = _recompiled(answer, SLOTS=slots, RING=slots * PIECE, PENDING=slots - 2)
        x, y = whole_numbers(draw, PIECE * pieces), unwritten(PIECE * pieces)
        says = f"{pieces} piece{'s' * (pieces > 1)} of {PIECE} elements and SLOTS = {slots}"
        right = x.reshape(pieces, PIECE)[:, ::-1].reshape(-1)
        with _waits() as allowed:
            counts = run(kernels[slots], says, 1, 128, x, y)
        compare(y, right, f"With {says}, y", before=np.nan)
    if counts.counts.copied_bytes < x.nbytes:
        wrong(
            f"With {says}, {counts.counts.copied_bytes} bytes went to the ring by cp_async_16, of {x.nbytes} "
            "that there are: begin a copy for each piece."
        )
    if counts.instructions.get("load shared", 0) < x.size // 128:
        wrong(
            "y is right, but its numbers do not come from the ring: the copies were waited for, and nobody "
            "read them. Read ring, where the piece is, in place of x."
        )
    early = slots - 2 - int(np.median(allowed)) if allowed else slots - 2
    scores = (
        Score(
            "Barriers for each piece",
            barriers_of_a_warp(counts, 4 * pieces),
            1,
            "one between the wait and the next copy says that the piece is there and that a slot is free",
        ),
        Score(
            "Copies that each wait waits for though they are not needed yet",
            max(early, 0),
            0,
            "cp_async_wait(PENDING) leaves the copies of later pieces under way",
        ),
    )
    return Right(len(cases), scores)


@contextlib.contextmanager
def _waits() -> Iterator[list[int]]:
    """How many groups each wait of a kernel leaves under way."""
    allowed: list[int] = []
    wait = AsyncCopies.wait

    def noted(copies: AsyncCopies, lanes: Any, groups: int) -> None:
        allowed.append(groups)
        wait(copies, lanes, groups)

    with mock.patch.object(AsyncCopies, "wait", noted):
        yield allowed
