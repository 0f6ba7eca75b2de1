"""Products of a warp's 16 rows with tiles of 64 rows in shared memory, for rungs 4 and 5.

A tile is 64 positions of q, k, v or a gradient, and 64 columns; a width beyond 64 takes two of them, one
behind the other, and what is missing to 64 or 128 columns is zeros. A block's four warps have 16 rows each.
Sums stand in registers as mma.sync leaves them: element e of a lane's 32 lies in row e // 2 % 2 * 8 + lane //
4 and column e // 4 * 8 + lane % 4 * 2 + e % 2. Rounded to 16 bits in pairs, they are a left factor (`pack`).

Matmul's rung 9 has the functions that copy and read tiles without bank conflicts, along their rows and across
(`tiling/fragment_tiles.py`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint32

from ..instructions import warp_fragments as ops
from ..runtime.matrix import Matrix
from ..tiling.fragment_tiles import fragment_tile, sums_writer
from ..tiling.packing import packed
from ..tiling.panels import inlined, unrolled

SIDE = 64  # rows of a tile, and columns of a part of it
WORDS = SIDE * SIDE // 2  # of a part in shared memory
THREADS = 128
WIDEST = 128
EVERYONE = 0xFFFFFFFF  # lanes of a warp
LOG2_E = math.log2(math.e)
INFINITY = math.inf


class Products(NamedTuple):
    """The device functions. `at` and `own` are where tiles begin in shared memory, in words."""

    # copy(shared, at, x, pitch, first, end, width, thread): begin to copy 64 rows of x; zeros from row `end`
    copy: Any
    # along(sums, shared, own, at, warp, lane): sums = the warp's rows of tile `own` times tile `at`^T
    along: Any
    # hide(scores, end, seen, transposed): -infinity from column `end` on, and where column - row is larger
    # than `seen`, transposed where it is smaller; counted from the lane's first row and column
    hide: Any
    # pack(factors, sums): round 64 columns of sums to a left factor
    pack: Any
    # across(sums, factors, shared, at, lane): sums += factors times tile `at`
    across: Any
    # store(x, pitch, end, width, row, sums, shared, warp, lane): store sums from this row of x on, as far as
    # row `end`, through the warp's rows of the first tile in shared memory
    store: Any


def parts_of(width: int) -> int:
    """Return how many parts a tile of this width has."""
    if width > WIDEST:
        raise ValueError(f"q is {width} wide: tensor cores' rungs take {WIDEST} at most; take s2_warp_rows")
    return -(-width // SIDE)


def in_chunks(x: Matrix) -> Any:
    """Return the data of x with rows as many chunks of 16 bytes apart as the width takes."""
    return packed(x._replace(column_stride=1), 8, padded=True).data


@functools.cache
def products(dtype: str, parts: int) -> Products:
    """Return the device functions for "float16" or "bfloat16"."""
    half = dtype == "float16"
    multiply = ops.mma_m16n8k16_f16 if half else ops.mma_m16n8k16_bf16
    convert = ops.cvt_f16x2 if half else ops.cvt_bf16x2
    left = fragment_tile(dtype, "a", SIDE, False, THREADS)
    right = fragment_tile(dtype, "b", SIDE, False, THREADS)
    turned = fragment_tile(dtype, "b", SIDE, True, THREADS)
    write = sums_writer(dtype, 16, SIDE)

    @inlined
    def copy(shared, at, x, pitch, first, end, width, thread):  # type: ignore[no-untyped-def]
        source = left.source(pitch, first, thread)
        for part in range(parts):
            there, column = int32(at + part * WORDS), int32(part * SIDE)
            left.copy(shared, there, x, source + column, pitch, first, end, column, width, thread)

    @inlined
    def add_along(k, sums, shared, own, at):  # type: ignore[no-untyped-def]
        rows, columns = cuda.local.array(4, uint32), cuda.local.array(16, uint32)
        part = k // 4 * WORDS
        left.read(rows, 0, shared, own + part, 0, k % 4)
        for x in range(4):
            right.read(columns, x * 4, shared, at + part, x, k % 4)
        for y in range(8):
            multiply(sums, y * 4, rows, 0, columns, y * 2)

    @inlined
    def add_across(k, sums, factors, shared, at):  # type: ignore[no-untyped-def]
        columns = cuda.local.array(16, uint32)
        for part in range(parts):
            for x in range(4):
                turned.read(columns, x * 4, shared, at + part * WORDS, x, k)
            for y in range(8):
                multiply(sums, part * 32 + y * 4, factors, k * 4, columns, y * 2)

    all_along, all_across = unrolled(add_along, 4 * parts), unrolled(add_across, 4)

    @inlined
    def along(sums, shared, own, at, warp, lane):  # type: ignore[no-untyped-def]
        for e in range(32):
            sums[e] = 0
        own_place = int32(own + left.place(int32(warp * 16), lane))
        all_along(sums, shared, own_place, int32(at + right.place(int32(0), lane)))

    @inlined
    def across(sums, factors, shared, at, lane):  # type: ignore[no-untyped-def]
        all_across(sums, factors, shared, int32(at + turned.place(int32(0), lane)))

    @inlined
    def hide(scores, end, seen, transposed):  # type: ignore[no-untyped-def]
        for e in range(32):
            column = e // 4 * 8 + e % 2
            beyond = column - e // 2 % 2 * 8 - seen
            if column >= end or (beyond < 0 if transposed else beyond > 0):
                scores[e] = -INFINITY

    @inlined
    def pack(factors, sums):  # type: ignore[no-untyped-def]
        for e in range(16):
            factors[e] = convert(sums[2 * e], sums[2 * e + 1])

    @inlined
    def store_part(part, x, pitch, end, width, row, sums, shared, warp, lane):  # type: ignore[no-untyped-def]
        some = cuda.local.array(32, float32)
        for e in range(32):
            some[e] = sums[part * 32 + e]
        cuda.syncwarp()
        write(x, pitch, end, width, row, int32(part * SIDE), some, shared, warp, lane)

    return Products(copy, along, hide, pack, across, unrolled(store_part, parts))
