"""Store a warp's sums from registers to rows of c (rung 9).

A lane holds two neighbouring sums of a row, and eight groups of lanes hold eight rows. In float32 the four
lanes of a row store 32 bytes, a whole sector of the caches. In 16 bits that would be half a sector, so the
warp passes its sums through shared memory, without the other warps, and stores whole lines of 128 bytes.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, int32, int64, uint16, uint32

from ..instructions.copies import load_128, store_64, store_128
from ..instructions.warp import cvt_bf16x2, cvt_f16x2


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
