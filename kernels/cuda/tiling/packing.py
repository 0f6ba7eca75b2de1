"""Copy matrices into a layout that kernels can read 16 bytes at a time, and results back to any strides.

Callers bring matrices of any strides. Kernels that copy 16 bytes at once need one side with unit stride and
rows that begin on 16 bytes; `packed` copies any other matrix, at the cost of reading and writing it
once. A product reads it far more often.

A warp reads 32 elements at once. If they are consecutive, that is one or two memory transactions; if they lie
a pitch apart it is 32. When the source has its unit stride along columns and the target along rows, one of
the two would be scattered. So a block takes a tile of 32 x 32 through shared memory: its warps read along the
source's unit stride and write along the target's. Rows of the tile are 33 elements apart, so a column of it
lies in 32 different banks.
"""

from __future__ import annotations

import functools
from typing import Any

from ...rung import empty
from ..runtime.device import backend
from ..runtime.gpu_driver import allocate
from ..runtime.kernel import Kernel
from ..runtime.matrix import BYTES, Matrix

SIDE = 32  # of a tile
THREADS = 256
MOST_ACROSS = 65535  # blocks along y, of any grid; there may be more tiles


def packed(x: Matrix, multiple: int, padded: bool = False) -> Matrix:
    """Return x with unit stride on one side, and with pitch and address multiples of `multiple` elements.

    That is x itself if it is so already. Otherwise it is a copy in x's storage order (rows if it has neither)
    with its pitch rounded up; columns beyond the last hold zeros. With `padded`, x is also copied if its
    unit-stride side is not a multiple, so that a kernel may read whole groups of `multiple` elements at the
    edge. The copy is enqueued on the current stream.
    """
    if x.order == "columns":
        p = packed(x.T, multiple, padded)
        return x if p.data is x.data else p.T
    if (
        x.order == "rows"
        and x.row_stride % multiple == 0
        and (x.rows == 1 or x.row_stride >= x.columns)
        and x.address % (multiple * x.itemsize) == 0
        and not (padded and x.columns % multiple)
    ):
        return x
    copy = scratch(x.rows, x.columns, x.dtype, multiple)
    _copy(x, copy, copy.row_stride)
    return copy


def scratch(rows: int, columns: int, dtype: str, multiple: int) -> Matrix:
    """Return an uninitialised matrix in rows, whose pitch is a multiple of `multiple` elements.

    It begins on a cache line, and its memory reaches to the end of the last row's pitch. On a GPU it is
    allocated in the order of the current stream.
    """
    pitch = -(-columns // multiple) * multiple
    kind = "uint16" if BYTES[dtype] == 2 else dtype
    if backend() == "gpu":
        data: Any = allocate(rows * pitch, kind)
    else:
        data = empty(1, rows * pitch, kind)[0]
    return Matrix(data, rows, columns, pitch, 1, dtype)


def aligned_rows(c: Matrix) -> Matrix:
    """Return c if its rows begin on 16 bytes, else a scratch matrix from which `copy_back` copies."""
    multiple = 16 // c.itemsize
    fits = c.order == "rows" and c.row_stride % multiple == 0 and c.address % 16 == 0
    return c if fits else scratch(c.rows, c.columns, c.dtype, multiple)


def copy_back(x: Matrix, c: Matrix) -> None:
    """Copy x to c, of the same sizes and dtype, unless it is c; enqueued on the current stream."""
    if x is not c:
        _copy(x, c, c.columns)


@functools.cache
def kernel(dtype: str) -> Kernel:
    """Return the kernel for elements of "uint16", "float32" or "float64"."""
    import numba
    from numba import cuda, int32, int64

    element = getattr(numba, dtype)
    pitch = SIDE + 1
    size = SIDE * pitch
    warps = THREADS // SIDE

    def pack(source, s_row, s_column, into, t_row, t_column, rows, columns, width):  # type: ignore[no-untyped-def]
        tile = cuda.shared.array(size, element)
        i0 = int32(cuda.blockIdx.x * SIDE)
        lane = int32(cuda.threadIdx.x & (SIDE - 1))
        warp = int32(cuda.threadIdx.x >> 5)
        j0 = int32(cuda.blockIdx.y * SIDE)
        while j0 < width:  # range() with such a step would divide
            for step in range(warp, SIDE, warps):
                i = int32(step if s_column == 1 else lane)
                j = int32(lane if s_column == 1 else step)
                x = element(0)
                if i0 + i < rows and j0 + j < columns:
                    x = source[int64(i0 + i) * s_row + int64(j0 + j) * s_column]
                tile[i * pitch + j] = x
            cuda.syncthreads()
            for step in range(warp, SIDE, warps):
                i = int32(step if t_column == 1 else lane)
                j = int32(lane if t_column == 1 else step)
                if i0 + i < rows and j0 + j < width:
                    into[int64(i0 + i) * t_row + int64(j0 + j) * t_column] = tile[i * pitch + j]
            cuda.syncthreads()
            j0 = int32(j0 + cuda.gridDim.y * SIDE)

    return Kernel(pack, threads=THREADS, blocks=4)


def _copy(x: Matrix, into: Matrix, width: int) -> None:
    """Copy x to the first columns of `into`, and zeros to the columns from there to `width`; same dtype."""
    grid = (-(-x.rows // SIDE), min(-(-width // SIDE), MOST_ACROSS))
    kernel("uint16" if x.itemsize == 2 else x.dtype).launch(
        grid,
        x.data,
        x.row_stride,
        x.column_stride,
        into.data,
        into.row_stride,
        into.column_stride,
        x.rows,
        x.columns,
        width,
    )
