"""Round wgmma's sums and lay them out in shared memory, from where the copy engine stores them (rung 10).

A slab is 64 rows of 128 bytes: the sums of one warp group for 64 columns of 16-bit elements or 32 of float32.
It is swizzled as the copy engine expects: the 16-byte chunk c of row r lies at c ^ (r % 8). So the eight rows
of 16 bytes that stmatrix stores at once lie in different banks.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, int32, uint32

from ..instructions.copies import store_64
from ..instructions.warp_fragments import cvt_bf16x2, cvt_f16x2, stmatrix_x4


@functools.cache
def slab_writer(result: str) -> tuple[Any, int]:
    """Return (write_slab, columns): the device function that writes a slab of this dtype, and its columns.

    write_slab(shared, start, sums, slab, thread): `shared` holds words of 32 bits, `start` is a multiple of
    1024 bytes, `sums` are those of `instructions/wgmma.py`, and `thread` is 0 to 127 in the warp group.
    """
    if result == "float32":
        return _write_floats, 32
    return _halves_writer(result), 64


def _halves_writer(result: str) -> Any:
    convert = cvt_bf16x2 if result == "bfloat16" else cvt_f16x2

    @cuda.jit(device=True, forceinline=True)
    def write_halves(shared, start, sums, slab, thread):  # type: ignore[no-untyped-def]
        words = cuda.local.array(4, uint32)
        lane = int32(thread & 31)
        row = int32((thread >> 5) * 16 + (lane & 15))  # whose address this lane gives
        for pair in range(4):  # two times 8 columns; of each 8 rows and 8 rows
            for q in range(4):
                e = slab * 32 + pair * 8 + q * 2
                words[q] = convert(sums[e], sums[e + 1])
            chunk = int32((pair * 2 + (lane >> 4)) ^ (row & 7))
            stmatrix_x4(shared, start + row * 32 + chunk * 4, words, 0)

    return write_halves


@cuda.jit(device=True, forceinline=True)
def _write_floats(shared, start, sums, slab, thread):  # type: ignore[no-untyped-def]
    lane = int32(thread & 31)
    for half in range(2):  # rows g and g + 8 of the warp's 16
        row = int32((thread >> 5) * 16 + half * 8 + (lane >> 2))
        for eight in range(4):  # columns
            chunk = int32((eight * 2 + ((lane & 3) >> 1)) ^ (row & 7))
            word = int32(start + row * 32 + chunk * 4 + (lane & 1) * 2)
            store_64(shared, word, sums, slab * 16 + eight * 4 + half * 2)
