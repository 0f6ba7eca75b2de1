"""Copy a matrix between any strides, so that reads and writes both are of consecutive elements.

A warp reads 32 elements at once; where they lie one after another that is one or two transactions with
memory, where they lie a pitch apart it is 32. When the source has its unit stride along columns and the
target along rows, one of both would be scattered. So a block takes a tile of 32 x 32 through shared memory:
its warps read along the source's unit stride and write along the target's. The rows of the tile are 33
elements apart, so that a column of it lies in 32 different banks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..runtime.kernel import Kernel

if TYPE_CHECKING:
    from .matrix import Matrix

SIDE = 32  # of a tile
THREADS = 256
MOST_ACROSS = 65535  # blocks along y, of any grid; there may be more tiles


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


def copy(x: Matrix, into: Matrix, width: int) -> None:
    """Copy x to the first columns of `into`, and zeros to those from there to `width`; same dtype.

    Enqueued on the current stream.
    """
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
