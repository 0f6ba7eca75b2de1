"""A matrix in the memory of the back end, as kernels take it: a 1-D array, two sizes and two strides.

Callers of a rung may bring rows or columns that lie one after another, every second row, or a slice.
`tiling/packing.py` copies matrices for kernels that need more.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from .gpu_memory import DeviceArray
from .tensor_map import BYTES

StorageOrder = Literal["rows", "columns", "neither"]
FREE_PITCH = 128  # a stride along a side of one element is never used: take a multiple that suits all kernels


class Matrix(NamedTuple):  # made in less than half of a frozen dataclass's time, three for each product
    """A matrix (rows, columns): element (i, j) is data[i * row_stride + j * column_stride]."""

    data: Any  # 1-D, from element (0, 0) to the last; float16 and bfloat16 travel as uint16
    rows: int
    columns: int
    row_stride: int  # in elements; never negative, and 0 only along one element
    column_stride: int
    dtype: str  # "float32", "float64", "float16", "bfloat16"

    @property
    def order(self) -> StorageOrder:
        """The storage order: "rows" (C order), "columns" (Fortran order), or "neither"."""
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
    """Return the matrix of a 2-D NumPy array, in its own memory if its strides allow that, else of a copy.

    `dtype` is what its elements are: float16 and bfloat16 may come as uint16. Negative strides, and a stride
    of 0 along more than one element, need a copy.
    """
    size = x.dtype.itemsize
    if any(n > 1 and (s <= 0 or s % size) for n, s in zip(x.shape, x.strides, strict=True)):
        x = np.ascontiguousarray(x)
    rows, columns = x.shape
    row_stride, column_stride = element_strides(rows, columns, x.strides[0] // size, x.strides[1] // size)
    length = 1 + (rows - 1) * row_stride + (columns - 1) * column_stride
    data = np.lib.stride_tricks.as_strided(x, (length,), (size,), writeable=x.flags.writeable)
    return Matrix(
        data.view(np.uint16) if size == 2 else data, rows, columns, row_stride, column_stride, dtype
    )


def element_strides(rows: int, columns: int, row_stride: int, column_stride: int) -> tuple[int, int]:
    """Return the strides; along a side of one element, choose one with which no copy is needed."""
    if columns == 1 and (row_stride == 1 or rows == 1):
        if rows == 1:
            return FREE_PITCH, 1
        return 1, -(-rows // FREE_PITCH) * FREE_PITCH
    if columns == 1:
        return row_stride, 1
    if rows == 1:
        return (-(-columns // FREE_PITCH) * FREE_PITCH if column_stride == 1 else 1), column_stride
    return row_stride, column_stride
