"""A tensor map: what Hopper's copy engine (TMA) knows of a matrix, so that one thread can fetch a tile.

It holds address, sizes, pitch, the box that one copy moves, and the swizzle of the box in shared memory. A
copy then names only the coordinates of its corner; elements outside the matrix arrive as zeros. In a kernel
it is an argument of type uint8[::1]. On a GPU that is the driver's CUtensorMap, 128 bytes in global memory;
the emulator gets this object itself.

Sources: PTX ISA, "Tensors" (bounding box, swizzling modes); CUDA Driver API, cuTensorMapEncodeTiled, which
has the rules that are checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
