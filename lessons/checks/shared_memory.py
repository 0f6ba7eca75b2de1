"""Checks of lesson 4: barriers, what a tiled product reads, the product itself, banks, and a transpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from checks.cuda_from_python import unwritten, whole_numbers
from checks.kernels import in_float64, run, with_constants
from checks.support.diagnosis import of_product
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Score, compare, wrong
from minidist.kernels.cuda.emulator import Profile

lesson = Lesson(4, "shared_memory")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

PIECE = 128  # elements, and threads of a block, in `backwards`
SIDE = 32  # of the tiles of `transpose`


@lesson.exercise(
    "4.1",
    hints=(
        "Follow one element of tile. Who writes it, who reads it, and who writes it again? Between which of "
        "these does a warp have to wait for the others?",
        "Thread t reads what thread 127 - t wrote, which is in another warp: wait after the write. And the "
        "next round of the loop overwrites tile[t], which another thread may still be about to read.",
        "Two lines, both within the loop: cuda.syncthreads() after tile[t] = ..., and once more after "
        "y[...] = ...",
    ),
)
def backwards(answer: Answer, draw: np.random.Generator) -> Right:
    """Barriers where they are needed, and nowhere else."""
    cases = [(1, 1), (2, 1), (2, 2), (5, 1), (int(draw.integers(5, 9)), 2)]
    for pieces, blocks in cases:
        x, y = whole_numbers(draw, PIECE * pieces), unwritten(PIECE * pieces)
        says = f"{x.size} elements and {blocks} block{'s' * (blocks > 1)} of {PIECE} threads"
        right = x.reshape(pieces, PIECE)[:, ::-1].reshape(-1)
        counts = run(answer, says, blocks, PIECE, x, y)
        compare(y, right, f"With {says}, y", before=np.nan)
    kinds, least = counts.instructions, 4 * pieces  # four warps to a piece
    if min(kinds.get("store shared", 0), kinds.get("load shared", 0)) < least:
        wrong(
            "y is right, but the numbers do not go through tile: a thread has to write an element to shared "
            "memory, and to read one that another thread wrote. Keep both lines, and put in the barriers."
        )
    barriers = barriers_of_a_warp(counts, 4 * pieces)
    return Right(
        len(cases), (Score("Barriers for each piece", barriers, 2, "after each use of tile is enough"),)
    )


def barriers_of_a_warp(counts: Profile, times: int) -> float:
    """Barriers that were executed, over the times that a warp came by."""
    return counts.instructions.get("barrier", 0) / times


@lesson.exercise(
    "4.2",
    hints=(
        "Take an element of a. Which tiles of c need it, and so how many blocks fetch it?",
        "a[i, p] is needed by every tile of c that has row i: as many as there are tiles side by side, n / "
        "tile, rounded up. And b[p, j] by every tile that has column j.",
        "return m * k * -(-n // tile) + k * n * -(-m // tile)",
    ),
)
def reads(answer: Answer, draw: np.random.Generator) -> Right:
    """Elements that are read from global memory, as a formula."""
    cases = [
        (8, 16, 4, 4),
        (1, 1, 1, 1),
        (8, 8, 8, 1),
        (8, 8, 8, 8),
        (8, 8, 8, 4),
        (9, 8, 8, 8),
        (8, 9, 8, 8),
    ]
    cases += [(8, 8, 9, 8), (5, 3, 0, 4), (2, 3, 4, 16)]
    cases += [(*(int(s) for s in draw.integers(1, 300, 3)), int(draw.integers(1, 40))) for _ in range(12)]
    for m, n, k, tile in cases:
        across, down = int(np.ceil(n / tile)), int(np.ceil(m / tile))
        wrongs = {
            "That rounds down: a last, smaller tile is fetched too.": n // tile * m * k + m // tile * n * k,
            "That exchanges two: a is read for each tile of columns, b for each of rows.": (
                down * m * k + across * n * k
            ),
            "That counts elements beyond the edges, which nobody fetches.": (
                2 * across * down * tile * -(-k // tile) * tile
            ),
        }
        right = across * m * k + down * n * k
        answer.expect(right, m, n, k, tile, wrongs=wrongs)
    return Right(len(cases))


@lesson.exercise(
    "4.3",
    hints=(
        "A loop over p = 0, TILE, 2 TILE, ... below k. In each round: fetch an element of a and one of b, "
        "wait, take TILE steps of the sum, wait.",
        "The tile of a that begins at column p has a[i, p + x] at [y, x]; the tile of b that begins at row "
        "p has b[p + y, j] there. Beyond the edges write float32(0), which adds nothing: every element of a "
        "tile is read. No thread may leave before the last barrier; guard only the fetches and the write to "
        "c.",
        "tile_a[y, x] = a[i, p + x] if i < c.shape[0] and p + x < a.shape[1] else float32(0), the same for "
        "tile_b[y, x] = b[p + y, j], cuda.syncthreads(), `for q in range(TILE): total += tile_a[y, q] * "
        "tile_b[q, x]`, cuda.syncthreads(). After the loop c[i, j] = total, if there is such an element.",
    ),
)
def tiled_matmul(answer: Answer, draw: np.random.Generator) -> Right:
    """The product, through tiles in shared memory."""
    sizes = [
        (16, 2, 3, 4),
        (16, 1, 1, 1),
        (16, 16, 16, 16),
        (16, 16, 16, 40),
        (16, 20, 33, 17),
        (16, 4, 4, 0),
    ]
    sizes += [(16, *(int(s) for s in draw.integers(2, 45, 3))), (8, 9, 20, 17), (16, 32, 48, 48)]
    kernels: dict[int, Any] = {}
    for tile, m, n, k in sizes:
        if tile not in kernels:
            kernels[tile] = _with_tile(answer, tile)
        a, b, c = whole_numbers(draw, m, k), whole_numbers(draw, k, n), unwritten(m, n)
        says = f"a of {m} x {k}, b of {k} x {n} and TILE = {tile}"
        counts = run(kernels[tile], says, (-(-n // tile), -(-m // tile)), (tile, tile), a, b, c)
        compare(c, a @ b, f"With {says}, c", before=np.nan, story=of_product(a, b))
    threads, steps = m * n, k // tile
    scores = (
        Score(
            "Reads of global memory by each thread",
            counts.total.load_bytes / 4 / threads,
            2 * steps,
            "fetch one element of a and one of b for each tile, and take all else from the tiles",
        ),
        Score(
            "Barriers for each tile", barriers_of_a_warp(counts, threads // 32 * steps), 2, "two are enough"
        ),
        Score("Bank conflicts", counts.shared_conflicts, 0, "let a warp read along a row of a tile"),
    )
    return Right(len(sizes), scores + in_float64(kernels[tile].function, a, b, c))


def _with_tile(answer: Answer, tile: int) -> Answer:
    kernel = answer.function
    return Answer(answer.name, with_constants(kernel, TILE=tile)) if hasattr(kernel, "py_func") else answer


@lesson.exercise(
    "4.4",
    hints=(
        "In which bank does word w lie? And thread t's word is t * stride. Write down the 32 banks for a "
        "stride of 2, and for one of 32.",
        "A bank hands out one word in a pass. So look for the busiest bank: the one with the most different "
        "words. At a stride of 0 all threads want the same word, and one pass serves them all.",
        "words = {t * stride for t in range(32)}, a set, so that each counts once; banks = [w % 32 for w in "
        "words]; return max(banks.count(bank) for bank in banks)",
    ),
)
def passes(answer: Answer, draw: np.random.Generator) -> Right:
    """Passes through shared memory."""
    strides = [1, 2, 32, 0, 3, 33, 4, 64, 16, 31, 8, 48, *(int(s) for s in draw.integers(5, 200, 8))]
    for stride in strides:
        words = np.unique(np.arange(32) * stride)
        answer.expect(int(np.bincount(words % 32).max()), stride)
    return Right(len(strides))


@lesson.exercise(
    "4.5",
    hints=(
        "Copy a tile of a into shared memory along its rows, wait, and write it to out along the rows of "
        "out. Across, against the rows, you only go in shared memory.",
        "The block's tile of a begins at row blockIdx.y * 32 and column blockIdx.x * 32. Where does it "
        "begin in out? There, thread (x, y) writes row y, column x, which is tile[x, y]. For the banks: how "
        "long may a row of tile be, so that a column lies in different banks?",
        "tile of (32, 33). Then: if i < a.shape[0] and j < a.shape[1]: tile[y, x] = a[i, j]; "
        "cuda.syncthreads(); i = cuda.blockIdx.x * 32 + y; j = cuda.blockIdx.y * 32 + x; "
        "if i < out.shape[0] and j < out.shape[1]: out[i, j] = tile[x, y].",
    ),
)
def transpose(answer: Answer, draw: np.random.Generator) -> Right:
    """Along rows in global memory, both times, and no conflicts in shared memory."""
    sizes = [
        (2, 3),
        (1, 1),
        (32, 32),
        (33, 5),
        (32, 64),
        tuple(int(s) for s in draw.integers(2, 100, 2)),
        (64, 96),
    ]
    for m, n in sizes:
        a, out = whole_numbers(draw, m, n), unwritten(n, m)
        kept = a.copy()
        says = f"a of {m} x {n}"
        counts = run(answer, says, (-(-n // SIDE), -(-m // SIDE)), (SIDE, SIDE), a, out)
        compare(out, kept.T, f"With {says}, out", before=np.nan)
        if (a != kept).any():
            wrong(f"With {says}, a was changed, and should stay as it was.")
    through = "write a tile to shared memory along rows, and read it there along columns"
    scores = (
        Score("Sectors for each load of a warp", counts.sectors_per_load, 4, through),
        Score("Sectors for each store", counts.sectors_per_store, 4, through),
        Score(
            "Bank conflicts",
            counts.shared_conflicts,
            0,
            "make the rows of tile a word longer than they need to be",
        ),
    )
    return Right(len(sizes), scores)
