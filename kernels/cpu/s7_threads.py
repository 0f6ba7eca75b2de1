"""Rung 7: rung 6 on all cores.

The idea: the blocks of rung 6 do not depend on each other, so each core computes some of them. First all
threads pack b together, into the last cache, which they share. Then each thread takes the next part of out
that is left, packs its rows of a, and multiplies. A shared counter deals out the parts instead of a fixed
plan, so a thread that wakes up late, or whose core is busy, takes fewer. The caller's thread takes parts from
the front, the others from the back. A product that rung 6 does not pack is cut in the same way.

It uses this process's cores, or as many threads as $NUMBA_NUM_THREADS says when Numba is imported. After a
product its threads watch for about 0.3 ms whether the next one is posted (`support/board.py`). A product too
small for two threads, or posted while another one is, runs through rung 6's loops in the caller's thread.

Measured: on two cores rung 6 takes 1.4 times as long at 128 x 128 x 128 in float32 (40 us and 29 us), and 1.9
times at 1024 (20 ms and 10.5 ms, 205 GFLOP/s).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from ..rung import Array, Rung
from .support import one_thread, thread_pool
from .support.block_sizes import blocks, cut, memory
from .support.compiling import compiled

if TYPE_CHECKING:
    from .support import board, register_tile, shared_packing, small_products, vector_moves

LEAST_WORK = 300_000  # multiply-adds per thread; with fewer, the product ends before another has begun
SHARED = 2**25  # bytes of b that are packed at a time
PATIENCE = thread_pool.PATIENCE  # copied here because compiled code reads this module's globals


@compiled("AAA", uses=("small_products",), nogil=True, boundscheck=False)
def _way(a: Array, b: Array, out: Array, near: int, far: int) -> int:
    return small_products.way(a, b, out, near, far)  # type: ignore[no-any-return]


@compiled("AAAC", uses=("shared_packing",), nogil=True, boundscheck=False)
def _post(
    a: Array,
    b: Array,
    out: Array,
    shared: Array,  # all threads' memory: for b, and behind it a word for each of its parts
    at: int,  # address of the board
    how: int,
    threads: int,
    packs: int,  # parts of b, side by side
    down: int,  # parts of out, one below the other
    across: int,  # and side by side
) -> None:
    shared_packing.post(at, a, b, out, shared, how, threads, (packs, down, across))


@compiled(
    "C",
    uses=("board", "register_tile", "shared_packing", "small_products", "vector_moves"),
    nogil=True,
    boundscheck=False,
)
def _work(space: Array, at: int, seen: int, leads: int) -> int:
    """Take parts of products posted after number `seen`; `space` is this thread's memory.

    The thread that `leads` returns at its product's end; others return 0 if none comes, -1 for another dtype.
    """
    own = vector_moves.pointer(space, 0, 0)
    while True:
        seen = board.join(at, seen, space.itemsize, leads, PATIENCE)
        if seen <= 0:
            return seen
        a, b, out = board.array(at, 0, space), board.array(at, 1, space), board.array(at, 2, space)
        how, packs, down, across, packed_b = board.cut(at, space)
        tile = register_tile.ROWS, register_tile.columns(out)
        if not how:
            shared_packing.pack_together(b, packed_b, at, packs * -(-a.shape[1] // register_tile.DEPTH))
        part = board.take(at, down * across, leads)
        while part >= 0:
            i0, i1, j0, j1, tiles = shared_packing.place(part, out.shape, tile, (down, across), how)
            if how:
                small_products.multiply(a[i0:i1], b[:, j0:j1], out[i0:i1, j0:j1], how)
            else:
                shared_packing.multiply_packed(a[i0:i1], packed_b, out[i0:i1], j0, j1, own, tiles)
            part = board.take(at, down * across, leads)
        board.leave(at)
        if leads:
            board.close(at, PATIENCE)
            return 0


def compute(a: Array, b: Array, out: Array) -> None:
    """Fill out (m, n) with a (m, k) times b (k, n)."""
    work = out.size * a.shape[1]
    if work < 2 * LEAST_WORK:
        one_thread.compute(a, b, out)
        return
    if out.strides[0] < out.strides[1]:  # Fortran order: compute the transposed product
        a, b, out = b.T, a.T, out.T
    kind = out.dtype.char
    size = blocks(kind)
    tiles = -(-out.shape[0] // size.rows) * -(-out.shape[1] // size.columns)
    # The caller wakes a thread in some 0.7 us, an eighth of LEAST_WORK: with t threads a product takes
    # work / t + t * LEAST_WORK / 8, which is least at the square root.
    pays = min(work // LEAST_WORK, math.isqrt(8 * work // LEAST_WORK))
    threads = min(thread_pool.threads(), tiles, pays)
    if threads < 2 or not thread_pool.begin(threads - 1):
        one_thread.compute(a, b, out)
        return
    try:
        how = _way(a, b, out, size.near, size.far)
        a, b = small_products.in_columns(a, b, how)
        (m, k), n, at = a.shape, b.shape[1], thread_pool.address()
        width = n if how else max(1, SHARED // (k * size.columns * out.itemsize)) * size.columns
        for j in range(0, n, width):
            strip, target = (b, out) if n <= width else (b[:, j : j + width], out[:, j : j + width])
            *parts, elements = cut(m, strip.shape[1], k, size, threads, packed=not how)
            shared, space = memory("b of all threads", kind, elements), memory("product", kind, size.memory)
            seats = min(threads, parts[1] * parts[2])
            _post(a, strip, target, shared, at, how, seats, *parts)
            thread_pool.wake(seats - 1, thread_pool.serve)
            _work(space, at, thread_pool.latest() - 1, 1)
            thread_pool.clear()
    finally:
        thread_pool.end()


def _help(kind: str, seen: int) -> int:
    """Work in a worker for what is posted after product number `seen`, until nothing is for a while."""
    return _work(memory("product", kind, blocks(kind).memory), thread_pool.address(), seen, 0)


thread_pool.HELP.update({4: functools.partial(_help, "f"), 8: functools.partial(_help, "d")})

RUNG = Rung.of_file(
    __name__,
    idea="All cores take blocks of out from a common counter; b is packed once, by all of them together.",
    dtypes=("float32", "float64"),
    compute=compute,
    cores="all",
    aligned=False,  # it writes each row of out a few times at most
)
