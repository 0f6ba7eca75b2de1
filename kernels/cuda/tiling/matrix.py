"""A matrix in the memory of the back end, as kernels take it: a 1-D array, two sizes and two strides.

Whoever calls a rung may bring rows or columns that lie one after another, every second row, a slice. Kernels
that copy 16 bytes at once need one side with unit stride and rows that begin on 16 bytes: `packed` copies a
matrix which is not so, at the cost of reading and writing it once (a product reads it far more often).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from ...rung import CACHE_LINE
from ..runtime.device import backend
from ..runtime.gpu_memory import DeviceArray
from ..runtime.tensor_map import BYTES

StorageOrder = Literal["rows", "columns", "neither"]
FREE_PITCH = 128  # a stride along which there is one element is of no account: a multiple that suits all


class Matrix(NamedTuple):  # made in less than half of a frozen dataclass's time, three for each product
    """A matrix (rows, columns): element (i, j) is data[i * row_stride + j * column_stride]."""

    data: Any  # 1-D, from element (0, 0) to the last; float16 and bfloat16 travel as uint16
    rows: int
    columns: int
    row_stride: int  # in elements; strides are never negative, and 0 only where nothing is behind it
    column_stride: int
    dtype: str  # "float32", "float64", "float16", "bfloat16"

    @property
    def order(self) -> StorageOrder:
        """Which side has unit stride: "rows" (C order), "columns" (Fortran's), or "neither"."""
        if self.column_stride == 1:
            return "rows"
        return "columns" if self.row_stride == 1 else "neither"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return BYTES[self.dtype]

    @property
    def address(self) -> int:
        """The address of element (0, 0)."""
        data = self.data
        address: int = data.address if isinstance(data, DeviceArray) else data.ctypes.data
        return address

    @property
    def T(self) -> Matrix:
        """The transposed matrix, in the same memory."""
        return Matrix(self.data, self.columns, self.rows, self.column_stride, self.row_stride, self.dtype)

    def view2d(self) -> Any:
        """Return the matrix as a 2-D array of any strides, for kernels that index a[i, p]."""
        shape = (self.rows, self.columns)
        strides = (self.row_stride * self.itemsize, self.column_stride * self.itemsize)
        if isinstance(self.data, DeviceArray):
            return self.data.viewed(shape, strides)
        return np.lib.stride_tricks.as_strided(self.data, shape, strides, writeable=self.data.flags.writeable)


def host_matrix(x: np.ndarray[Any, Any], dtype: str) -> Matrix:
    """Return the matrix of a 2-D NumPy array, in its own memory where its strides allow that, else a copy.

    `dtype` is what its elements are: float16 and bfloat16 may come as uint16. A negative stride, or one of 0
    along more than one element, is copied.
    """
    size = x.dtype.itemsize
    if any(n > 1 and (s <= 0 or s % size) for n, s in zip(x.shape, x.strides, strict=True)):
        x = np.ascontiguousarray(x)
    rows, columns = x.shape
    row_stride, column_stride = element_strides(rows, columns, x.strides[0] // size, x.strides[1] // size)
    length = 1 + (rows - 1) * row_stride * (rows > 1) + (columns - 1) * column_stride * (columns > 1)
    data = np.lib.stride_tricks.as_strided(x, (length,), (size,), writeable=x.flags.writeable)
    return Matrix(
        data.view(np.uint16) if size == 2 else data, rows, columns, row_stride, column_stride, dtype
    )


def element_strides(rows: int, columns: int, row_stride: int, column_stride: int) -> tuple[int, int]:
    """Return the strides, with such for sides of one element as make the matrix packed where it can be."""
    if columns == 1 and (row_stride == 1 or rows == 1):
        if rows == 1:
            return FREE_PITCH, 1
        return 1, -(-rows // FREE_PITCH) * FREE_PITCH
    if columns == 1:
        return row_stride, 1
    if rows == 1:
        return (-(-columns // FREE_PITCH) * FREE_PITCH if column_stride == 1 else 1), column_stride
    return row_stride, column_stride


def packed(x: Matrix, multiple: int, padded: bool = False) -> Matrix:
    """Return x with unit stride on one side, and with pitch and address multiples of `multiple` elements.

    That is x itself where it is so already, else a copy in the order that x has (rows where it has neither),
    whose pitch is so rounded up; from the last column to the pitch it holds zeros. With `padded` it is a copy
    too where the unit-stride side is no multiple, so that whole groups of `multiple` elements may be read at
    the edge. The copy is enqueued on the current stream.
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
    """Return a matrix in rows, uninitialised, whose pitch is a multiple of `multiple` elements.

    It begins on a cache line, and memory reaches to the end of the last row's pitch. On a GPU it is allocated
    in the order of the current stream.
    """
    pitch = -(-columns // multiple) * multiple
    kind = "uint16" if BYTES[dtype] == 2 else dtype
    if backend() == "gpu":
        from ..runtime.gpu_memory import allocate

        data: Any = allocate(rows * pitch, kind)
    else:
        memory = np.empty(rows * pitch * BYTES[dtype] + CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        data = memory[start : start + rows * pitch * BYTES[dtype]].view(kind)
    return Matrix(data, rows, columns, pitch, 1, dtype)


def copy_back(x: Matrix, c: Matrix) -> None:
    """Copy x to c, of the same sizes and dtype and any strides; enqueued on the current stream."""
    if (x.rows, x.columns, x.dtype) != (c.rows, c.columns, c.dtype):
        raise ValueError(
            f"x is {x.rows} x {x.columns} {x.dtype} and c is {c.rows} x {c.columns} {c.dtype}: "
            "a copy needs the same sizes and dtype"
        )
    _copy(x, c, c.columns)


def _copy(x: Matrix, into: Matrix, width: int) -> None:
    """Copy x to the first columns of `into`, and zeros to those from there to `width`."""
    if backend() == "simulator":  # where a kernel takes a Python thread for each of its own
        into.view2d()[...] = x.view2d()
        if width > x.columns:
            wide = Matrix(into.data, into.rows, width, into.row_stride, 1, into.dtype)
            wide.view2d()[:, x.columns :] = 0
        return
    from .packing import copy

    copy(x, into, width)
