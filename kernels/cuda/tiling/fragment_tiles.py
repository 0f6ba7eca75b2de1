"""Tiles for mma.sync (rung 9): copied to shared memory, read as fragments, and sums stored to rows of c.

A tile is `extent` rows of a, or columns of b, by one step of k. A step is 128 bytes: 64 elements of 16 bits
or 32 of 32 bits, in four slices, each the depth of one mma. The tile lies in shared memory as it does in
global memory, so that a copy moves 16 bytes at both ends. There are two layouts:

    along k    a line is one row of a, 128 bytes of k
    across k   a line is one of k, `extent` elements long

The 8 rows of a matrix that ldmatrix reads at once lie a line apart, and would all begin in the same bank. So
the 16-byte chunks of a line are permuted: chunk c of line r lies at c ^ (r % 8). Within 128 bytes, the width
of the 32 banks, eight consecutive lines then have it in eight different positions. ldmatrix can't transpose
TF32 across k, since it moves pairs of 16 bits; there lanes read single words, two chunks of four lines at
once, and c ^ 2 (r % 4) keeps those apart.

All indices into shared memory count words of 32 bits. Their common part is computed once, as a lane's
`place`. Each fragment is a constant away: added, or by XOR among the chunks that are permuted.

To store, a lane holds two neighbouring sums of a row, and eight groups of lanes hold eight rows. In float32
the four lanes of a row store 32 bytes, a whole sector of the caches. In 16 bits that would be half a sector,
so the warp passes its sums through shared memory, without the other warps, and stores whole lines of 128
bytes.

Sources: PTX ISA, ldmatrix (the fragments are in `instructions/warp_fragments.py`); Kerr, Developing CUDA
Kernels to Push Tensor Cores to the Absolute Limit on NVIDIA A100 (GTC 2020), for the order of the chunks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint16, uint32

from ..instructions.copies import cp_async_16_or_zeros, load_128, store_64, store_128
from ..instructions.warp_fragments import (
    cvt_bf16x2,
    cvt_f16x2,
    cvt_tf32,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_shared,
)
from .panels import inlined

LINE = 128  # bytes of k in a step
CHUNK = 16  # bytes
CHUNK_WORDS = CHUNK // 4
LINE_WORDS = LINE // 4


class FragmentTile(NamedTuple):
    """The device functions for one operand's tiles."""

    # source(stride, first, thread): the index (int64) of the first element that a thread copies for p = 0.
    # `stride` is the operand's non-unit stride; the tile begins with its row (b: column) `first`.
    source: Any
    # advance(stride): by how much `source` grows from step to step.
    advance: Any
    # copy(shared, start, x, source, stride, first, count, p, k, thread): begin to copy step p of the tile to
    # shared[start]; zeros beyond `count` rows and beyond k.
    copy: Any
    # place(first, lane): where in a tile a lane begins to read its warp's fragments, which begin with row
    # `first`, a multiple of what the warp reads.
    place: Any
    # read(fragments, at, shared, place, x, part): fragments[at : at + 4] of rows 16x to 16x + 15 and slice
    # `part` of k: a fragment of a, or two of b for 8 columns each. x and part are constants.
    read: Any
    words: int  # of shared memory


@functools.cache
def fragment_tile(dtype: str, operand: str, extent: int, across: bool, threads: int) -> FragmentTile:
    """Return the functions for tiles of operand "a" or "b", which `threads` threads copy together.

    `dtype` is "float16", "bfloat16" or "float32", read as TF32; `across` says that the unit stride is not
    along k. The side with unit stride is a multiple of 16 bytes long, and every line of it begins on one.
    """
    size = 4 if dtype == "float32" else 2
    # Lanes 8q to 8q + 7 name the rows of matrix q of four. For a, matrix 1 lies 8 rows further and matrix 2
    # in the other half of the depth; for b it is the other way round.
    more_rows, more_depth = (3, 4) if operand == "a" else (4, 3)
    copies = _copies_across(size, extent, threads) if across else _copies_along(size, extent, threads)
    if not across:
        reads = _reads_along(dtype == "float32", more_rows, more_depth)
    elif size == 2:
        reads = _reads_across(extent, more_rows, more_depth)
    else:
        reads = _reads_words_across(extent, more_rows, more_depth)
    return FragmentTile(*copies, *reads, extent * LINE_WORDS)


def _copies_along(size: int, extent: int, threads: int) -> tuple[Any, Any, Any]:
    chunks = LINE // CHUNK
    lines = threads // chunks  # copied at once
    elements = CHUNK // size
    depth = LINE // size

    def source(stride, first, thread):  # type: ignore[no-untyped-def]
        return int64(first + thread // chunks) * stride + thread % chunks * elements

    def advance(stride):  # type: ignore[no-untyped-def]
        return int64(depth)

    def copy(shared, start, x, source, stride, first, count, p, k, thread):  # type: ignore[no-untyped-def]
        chunk = int32(thread % chunks)
        line = int32(thread // chunks)
        deep = p + chunk * elements < k
        into = int32(start + line * LINE_WORDS + (chunk ^ line % 8) * CHUNK_WORDS)
        for turn in range(extent // lines):
            inside = deep and first + line + turn * lines < count
            cp_async_16_or_zeros(shared, into + turn * lines * LINE_WORDS, x, source, inside)
            source += int64(stride) * lines

    return inlined(source), inlined(advance), inlined(copy)


def _copies_across(size: int, extent: int, threads: int) -> tuple[Any, Any, Any]:
    chunks = extent * size // CHUNK
    lines = threads // chunks
    elements = CHUNK // size
    depth = LINE // size
    words = extent * size // 4  # of a line
    single = size == 4

    def source(stride, first, thread):  # type: ignore[no-untyped-def]
        return int64(thread // chunks) * stride + (first + thread % chunks * elements)

    def advance(stride):  # type: ignore[no-untyped-def]
        return int64(stride) * depth

    def copy(shared, start, x, source, stride, first, count, p, k, thread):  # type: ignore[no-untyped-def]
        chunk = int32(thread % chunks)
        wide = first + chunk * elements < count
        for turn in range(depth // lines):
            line = int32(thread // chunks + turn * lines)
            there = int32(chunk ^ (line % 4 * 2 if single else line % 8))
            inside = wide and p + line < k
            cp_async_16_or_zeros(shared, start + line * words + there * CHUNK_WORDS, x, source, inside)
            source += int64(stride) * lines

    return inlined(source), inlined(advance), inlined(copy)


def _reads_along(rounds: bool, more_rows: int, more_depth: int) -> tuple[Any, Any]:
    def place(first, lane):  # type: ignore[no-untyped-def]
        line = int32(first + lane % 8 + (lane >> more_rows) % 2 * 8)
        return int32(line * LINE_WORDS + ((lane >> more_depth) % 2 ^ lane % 8) * CHUNK_WORDS)

    def read(fragments, at, shared, place, x, part):  # type: ignore[no-untyped-def]
        ldmatrix_x4(fragments, at, shared, (place ^ part * (2 * CHUNK_WORDS)) + x * (16 * LINE_WORDS))
        if rounds:
            for e in range(4):
                fragments[at + e] = cvt_tf32(fragments[at + e])

    return inlined(place), inlined(read)


def _reads_across(extent: int, more_rows: int, more_depth: int) -> tuple[Any, Any]:
    words = extent // 2

    def place(first, lane):  # type: ignore[no-untyped-def]
        line = int32(lane % 8 + (lane >> more_depth) % 2 * 8)
        chunk = int32(first // 8 + (lane >> more_rows) % 2)
        return int32(line * words + (chunk ^ line % 8) * CHUNK_WORDS)

    def read(fragments, at, shared, place, x, part):  # type: ignore[no-untyped-def]
        ldmatrix_x4_trans(fragments, at, shared, (place ^ x * (2 * CHUNK_WORDS)) + part * (16 * words))

    return inlined(place), inlined(read)


def _reads_words_across(extent: int, more_rows: int, more_depth: int) -> tuple[Any, Any]:
    second, third = more_rows - 3, more_depth - 3  # bits of a register's number

    def place(first, lane):  # type: ignore[no-untyped-def]
        line = int32(lane % 4)
        row = int32(first + lane // 4)
        return int32(line * extent + (row // 4 ^ line * 2) * CHUNK_WORDS + row % 4)

    def read(fragments, at, shared, place, x, part):  # type: ignore[no-untyped-def]
        for e in range(4):
            chunk = x % 2 * 4 + (e >> second) % 2 * 2
            line = part * 8 + (e >> third) % 2 * 4
            word = (place ^ chunk * CHUNK_WORDS) + x // 2 * LINE_WORDS + line * extent
            load_shared(fragments, at + e, shared, word)
            fragments[at + e] = cvt_tf32(fragments[at + e])

    return inlined(place), inlined(read)


@functools.cache
def sums_writer(result: str, rows: int, columns: int) -> Any:
    """Return the device function that stores a warp's sums (rows, columns), columns 64, as this dtype.

    write(c, stride, m, n, row, column, sums, shared, warp, lane) writes c from `row` and `column` on, as far
    as c (m, n) goes. `sums` holds for each 16 rows and 8 columns the registers of an mma. `shared` counts
    words of 32 bits, of which each warp of the block uses 32 times `rows`. Rows of c begin on 16 bytes.
    """
    return _floats_writer(rows, columns) if result == "float32" else _halves_writer(result, rows, columns)


def _floats_writer(rows: int, columns: int) -> Any:
    high, wide = rows // 16, columns // 8

    @cuda.jit(device=True, forceinline=True)
    def write(c, stride, m, n, row, column, sums, shared, warp, lane):  # type: ignore[no-untyped-def]
        for x in range(2 * high):  # 8 rows each
            i = int32(row + x * 8 + (lane >> 2))
            if i < m:
                start = int64(i) * stride
                for y in range(wide):
                    j = int32(column + y * 8 + (lane & 3) * 2)
                    e = (x // 2 * wide + y) * 4 + x % 2 * 2
                    if j + 1 < n:
                        store_64(c, start + j, sums, e)
                    elif j < n:
                        c[start + j] = sums[e]

    return write


def _halves_writer(result: str, rows: int, columns: int) -> Any:
    convert = cvt_bf16x2 if result == "bfloat16" else cvt_f16x2
    high, wide = rows // 16, columns // 8
    line = columns // 2  # words
    region = rows * line
    turns = rows // 4

    @cuda.jit(device=True, forceinline=True)
    def write(c, stride, m, n, row, column, sums, shared, warp, lane):  # type: ignore[no-untyped-def]
        words = cuda.local.array(4, uint32)
        start = int32(warp * region)
        for x in range(2 * high):
            for y in range(wide):
                e = (x // 2 * wide + y) * 4 + x % 2 * 2
                # Chunks of 16 bytes are permuted as in `fragment_tiles.py`: no two groups meet in a bank.
                word = start + (x * 8 + (lane >> 2)) * line + (y ^ (lane >> 2)) * 4 + (lane & 3)
                shared[uint32(word)] = convert(sums[e], sums[e + 1])
        cuda.syncwarp()
        j = int32(column + (lane & 7) * 8)
        for turn in range(turns):  # four lines, eight lanes each
            inside = int32(turn * 4 + (lane >> 3))
            i = int32(row + inside)
            load_128(words, 0, shared, start + inside * line + ((lane & 7) ^ (inside & 7)) * 4)
            if i < m:
                if j + 8 <= n:
                    store_128(c, int64(i) * stride + j, words, 0)
                else:
                    for e in range(8):
                        if j + e < n:
                            c[int64(i) * stride + j + e] = uint16(words[e // 2] >> uint32(e % 2 * 16))

    return write
