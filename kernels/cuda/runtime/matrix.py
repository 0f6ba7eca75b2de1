"""A matrix in the memory of the back end, as kernels take it: an array, sizes and strides, or a tensor map.

Callers of a rung may bring rows or columns that lie one after another, every second row, or a slice.
`tiling/packing.py` copies matrices for kernels that need more.

A tensor map is what Hopper's copy engine (TMA) knows of a matrix, so that one thread can fetch a tile. It
holds address, sizes, pitch, the box that one copy moves, and the swizzle of the box in shared memory. A copy
then names only the coordinates of its corner; elements outside the matrix arrive as zeros. In a kernel it is
an argument of type uint8[::1]. On a GPU that is the driver's CUtensorMap, 128 bytes in global memory; the
emulator gets this object itself.

Sources: PTX ISA, "Tensors" (bounding box, swizzling modes); CUDA Driver API, cuTensorMapEncodeTiled, which
has the rules that are checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ...rung import dtype_name
from .gpu_driver import DeviceArray

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SWIZZLES = (0, 32, 64, 128)  # bytes
LARGEST_BOX = 256  # elements, each way
SIZE = 128  # bytes of a CUtensorMap


@dataclass(eq=False)  # not frozen: that would take twice as long to make, and a product makes three
class TensorMap:
    """A row-major matrix, and the box that one copy moves; ValueError for what the copy engine can't do."""

    array: Any  # 1-D, begins at element (0, 0); on 16 bytes
    rows: int
    columns: int
    pitch: int  # elements between rows: a multiple of 16 bytes
    box_rows: int
    box_columns: int
    dtype: str  # "float16", "bfloat16", "float32", "float64"
    swizzle: int = 128  # bytes: 0 for none

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ValueError(f"dtype is {self.dtype!r}: a tensor map takes {', '.join(BYTES)}")
        size = BYTES[self.dtype]
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"the matrix is {self.rows} x {self.columns}: a tensor map needs elements")
        if self.pitch * size % 16 or self.pitch < self.columns:
            raise ValueError(
                f"pitch is {self.pitch} elements of {size} bytes for {self.columns} columns: it has to be a "
                "multiple of 16 bytes and no less than a row (cuda.tiling.packing.packed pads it)"
            )
        if not (0 < self.box_rows <= LARGEST_BOX and 0 < self.box_columns <= LARGEST_BOX):
            raise ValueError(
                f"the box is {self.box_rows} x {self.box_columns}: each side is 1 to {LARGEST_BOX}"
            )
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"swizzle is {self.swizzle}: pass {', '.join(map(str, SWIZZLES))} bytes")
        row = self.box_columns * size  # bytes of a row of the box
        if row % 16 or (self.swizzle and row > self.swizzle):
            raise ValueError(
                f"a row of the box is {row} bytes: it has to be a multiple of 16"
                + (f", and at most the swizzle's {self.swizzle}" if self.swizzle else "")
            )


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


def device_matrix(x: Any) -> Matrix | None:
    """Return the matrix of a CUDA tensor, in its own memory; None if one element stands for several."""
    rows, columns = x.shape
    row_stride, column_stride = x.stride()
    if rows == 1 or columns == 1 or not row_stride or not column_stride:
        if (row_stride == 0 and rows > 1) or (column_stride == 0 and columns > 1):
            return None
        row_stride, column_stride = element_strides(rows, columns, row_stride, column_stride)
    dtype = dtype_name(x.dtype)
    size = BYTES[dtype]
    length = 1 + (rows - 1) * row_stride + (columns - 1) * column_stride
    data = DeviceArray(x.data_ptr(), "uint16" if size == 2 else dtype, (length,), (size,), x)
    return Matrix(data, rows, columns, row_stride, column_stride, dtype)


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
