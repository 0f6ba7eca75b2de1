"""Rung 7: rung 6 on all cores.

The idea: the blocks of rung 6 do not depend on each other, so each core computes some of them. First all
threads pack b together. Then each thread takes the next part of out that is left, packs its rows of a, and
multiplies. A shared counter deals out the parts instead of a fixed plan, so a thread that wakes up late, or
whose core is busy, takes fewer. b is packed once for all threads, into the last cache, which the cores
share; a packed block of a belongs to one thread and stays in its core's own cache.

It uses this process's cores, or as many threads as the environment variable NUMBA_NUM_THREADS says when Numba
is imported. After a product its threads spin for about 0.3 ms, waiting for the next one, and keep its arrays
alive. A product too small for two threads runs through rung 6's loops in the caller's thread.

Measured: on two cores rung 6 takes 1.7 times as long at 512 x 512 x 512 in float32 (2.4 ms and 1.4 ms), and
2.0 times at 2048 (157 ms and 79 ms, 217 GFLOP/s), where OpenBLAS on both cores takes 1.03 times as long.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from ..rung import CACHE_LINE, Array, Rung, empty
from .support import thread_pool
from .support.block_sizes import PARTS, blocks, memory, parts
from .support.compiling import compiled

if TYPE_CHECKING:
    from .support import atomic, packed_product, register_tile, small_products, vector_moves

LEAST_WORK = 2_000_000  # multiply-adds per thread; with fewer, the product ends before another wakes up
SHARED = 2**25  # bytes of b that are packed at a time
PATIENCE = thread_pool.PATIENCE  # copied here because compiled code reads this module's globals
LINE = CACHE_LINE // 8  # counters in a cache line; counters in use at the same time lie in different lines


@compiled(
    "AAACC",
    uses=("atomic", "register_tile", "packed_product", "small_products", "vector_moves"),
    nogil=True,
    boundscheck=False,
)
def _take_parts(
    a: Array,
    b: Array,
    out: Array,
    space: Array,  # this thread's memory
    shared: Array,  # all threads' memory, for b
    counters: int,  # address of counters, all 0 at first
    packs: int,  # parts of b, side by side
    down: int,  # parts of out, one below the other
    across: int,  # parts of out, side by side
    leads: int,  # whether this is the caller's thread
    bell: int,  # address of the counter of products
    product: int,  # its value during this product
    near: int,  # elements of a product that need not be packed, as in `small_products`
    far: int,
) -> None:
    m, k = a.shape
    n = b.shape[1]
    own, packed_b = vector_moves.pointer(space, 0, 0), vector_moves.pointer(shared, 0, 0)
    columns = register_tile.columns(out)
    tiles, wide, depths = -(-m // register_tile.ROWS), -(-n // columns), -(-k // register_tile.DEPTH)
    taken, finished = counters, counters + CACHE_LINE
    packing, packed = counters + 2 * CACHE_LINE, counters + 3 * CACHE_LINE
    how = small_products.way(a, b, out, near, far)
    to_pack, to_multiply = 0 if how else depths * packs, down * across
    if leads:
        atomic.fetch_add(bell, 1)
    atomic.fetch_add(packing, 1)
    part = atomic.fetch_add(taken, 1)
    while part < to_pack:
        packed_product.pack_part(b, packed_b, part, packs)
        atomic.fetch_add(packed + 8 * part, 1)
        part = atomic.fetch_add(taken, 1)
    # Pack what other threads have not finished again, to the same values, instead of waiting: their cores may
    # belong to another program for milliseconds.
    for other in range(to_pack):
        if not atomic.read(packed + 8 * other):
            packed_product.pack_part(b, packed_b, other, packs)
    atomic.fetch_add(packing, -1)
    while part < to_pack + to_multiply:
        t, s = divmod(part - to_pack, across)
        t0, t1 = t * tiles // down, (t + 1) * tiles // down
        i0, i1 = t0 * m // tiles, t1 * m // tiles
        j0, j1 = s * wide // across * columns, min(n, (s + 1) * wide // across * columns)
        if how:
            # No part is narrower than a tile: what is left over belongs to the last.
            j0 = s * (n // columns) // across * columns
            j1 = n if s == across - 1 else (s + 1) * (n // columns) // across * columns
            small_products.multiply(a[i0:i1], b[:, j0:j1], out[i0:i1, j0:j1], how)
            depths = 0
        for d in range(depths):
            p0, p1 = d * k // depths, (d + 1) * k // depths
            panel = vector_moves.offset(packed_b, p0 * wide * columns + j0 * (p1 - p0))
            packed_product.multiply(a[i0:i1, p0:p1], panel, out[i0:i1, j0:j1], own, t1 - t0, d)
        atomic.fetch_add(finished, 1)
        part = atomic.fetch_add(taken, 1)
    if leads:
        atomic.wait(finished, to_multiply, PATIENCE)
    else:
        atomic.wait(bell, product + 1, PATIENCE)


@compiled("AAAC", uses=("packed_product", "small_products"), nogil=True, boundscheck=False)
def _multiply_alone(
    a: Array, b: Array, out: Array, space: Array, height: int, width: int, near: int, far: int
) -> None:
    """Multiply as rung 6 does, for a product that is too small for two threads."""
    how = small_products.way(a, b, out, near, far)
    if how:
        small_products.multiply(a, b, out, how)
    else:
        packed_product.multiply_in_blocks(a, b, out, space, height, width)


def compute(a: Array, b: Array, out: Array) -> None:
    """Fill out (m, n) with a (m, k) times b (k, n)."""
    if out.strides[0] < out.strides[1]:  # Fortran order: compute the transposed product
        a, b, out = b.T, a.T, out.T
    size = blocks(out.dtype.char)
    panels = SHARED // (a.shape[1] * size.columns * out.itemsize)
    tiles = -(-out.shape[0] // size.rows) * -(-out.shape[1] // size.columns)
    threads = min(thread_pool.threads(), tiles, out.size * a.shape[1] // LEAST_WORK)
    if threads < 2 or panels < 1:
        space = memory("product", out.dtype.char, size.memory + size.depth * size.width)
        _multiply_alone(a, b, out, space, size.tiles, size.width, size.near, size.far)
        return
    width = panels * size.columns
    for j in range(0, out.shape[1], width):
        _multiply(a, b[:, j : j + width], out[:, j : j + width], threads)


def _multiply(a: Array, b: Array, out: Array, threads: int) -> None:
    kind = out.dtype.char
    size = blocks(kind)
    tiles, wide = -(-a.shape[0] // size.rows), -(-b.shape[1] // size.columns)
    down, across = parts(tiles, wide, threads, size.tiles)
    shared = memory("b of all threads", kind, a.shape[1] * wide * size.columns)
    packs = min(wide, PARTS * threads)
    counters = empty(1, 3 * LINE + packs * -(-a.shape[1] // size.depth), np.int64)[0]
    counters[:] = 0
    caller, (bell, jobs) = threading.get_ident(), thread_pool.bell()

    limits = (size.near, size.far)

    def take_parts() -> None:
        leads = threading.get_ident() == caller
        space, start = memory("product", kind, size.memory), counters.ctypes.data
        _take_parts(a, b, out, space, shared, start, packs, down, across, leads, bell, jobs + 1, *limits)

    def done() -> bool:
        finished, packing = counters[LINE], counters[2 * LINE]
        return bool(finished == down * across and packing == 0)

    thread_pool.run(take_parts, threads, done)


RUNG = Rung(
    number=7,
    name="s7_threads",
    device="cpu",
    idea="All cores take blocks of out from a common counter; b is packed once, by all of them together.",
    dtypes=("float32", "float64"),
    compute=compute,
    aligned=False,  # it writes each row of out a few times at most
    cores="all",
)
