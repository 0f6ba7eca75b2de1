"""Tensor copies: the bytes that the tensor memory accelerator (TMA) moves between a matrix and shared memory.

One thread names a tensor map and the corner of a box. The copy engine computes all addresses and swizzles.
Outside of the matrix, a load fills in zeros and a store writes nothing (PTX ISA, "cp.async.bulk.tensor" and
"Tensors"). A tensor map has checked itself when it was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..memory.swizzles import CHUNK, swizzle
from ..ptx.dtypes import Array
from ..ptx.fault import EmulatorError, Fault
from ..ptx.program import PtxInstruction
from ..synchronization.mbarriers import Key

ALIGNMENT = 128  # bytes, of a box in shared memory
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class TensorMapLike(Protocol):
    """The attributes that the emulator reads of `minidist.kernels.cuda.runtime.tensor_map.TensorMap`."""

    array: Any
    rows: int
    columns: int
    pitch: int
    box_rows: int
    box_columns: int
    dtype: str
    swizzle: int


@dataclass(eq=False)
class BulkLoad:
    """A load under way, to one block."""

    instruction: PtxInstruction | None
    lane: int  # the thread that began it
    tensor: Any  # TensorMap
    corner: tuple[int, int]  # (x, y) of the box in the matrix
    block: int  # it writes to the shared memory of this block,
    chunks: Array  # (box rows, chunks): at these offsets, in units of 16 bytes
    granules: Array
    mbarrier: Key
    clock: Array  # what a thread learns that waits for it


@dataclass(eq=False)
class BulkStore:
    """A store under way."""

    instruction: PtxInstruction | None
    lane: int
    tensor: Any
    corner: tuple[int, int]
    chunks: Array
    clock: Array
    box: Array | None = None  # the data, once it is read


def check(tensor: TensorMapLike) -> None:
    """Raise EmulatorError for a tensor map that is not emulated."""
    inner = tensor.box_columns * _BYTES[tensor.dtype]
    if tensor.swizzle and inner < tensor.swizzle:
        raise EmulatorError(
            f"a row of the box is {inner} bytes: a {tensor.swizzle}-byte swizzle of less is not emulated"
        )


def box_bytes(tensor: TensorMapLike) -> int:
    """Return the bytes that one load writes and counts at its mbarrier: the whole box, zeros included."""
    return tensor.box_rows * tensor.box_columns * _BYTES[tensor.dtype]


def box_addresses(tensor: TensorMapLike, address: int, size: int) -> Array:
    """Return the shared-memory addresses of the 16-byte chunks (box rows, chunks) of a box at `address`.

    The swizzle's pattern depends on the address alone, not on where the box begins. Raises Fault if the box
    is not aligned to 128 bytes, or leaves the `size` bytes of the block's shared memory.
    """
    if address % ALIGNMENT:
        raise Fault(
            "misaligned", f"the box at {address:#x} of shared memory is not aligned to {ALIGNMENT} bytes"
        )
    if address + box_bytes(tensor) > size:
        raise Fault(
            "out of bounds",
            f"the box at {address:#x} takes {box_bytes(tensor)} bytes, and shared memory has {size}",
        )
    chunks = np.arange(box_bytes(tensor) // CHUNK).reshape(tensor.box_rows, -1)
    return swizzle(address + CHUNK * chunks, tensor.swizzle)


def load_box(tensor: TensorMapLike, x: int, y: int) -> Array:
    """Return the box at column x and row y, (box rows, chunks) of 16 bytes; 0 outside of the matrix."""
    bits = _bits(tensor)
    box = np.zeros((tensor.box_rows, tensor.box_columns), bits.dtype)
    inside, outer = _overlap(tensor, x, y)
    box[inside] = bits[outer]
    return box.view("V16")


def store_box(tensor: TensorMapLike, x: int, y: int, box: Array) -> None:
    """Write a box, (box rows, chunks) of 16 bytes, to the matrix at column x and row y."""
    bits = _bits(tensor)
    if not bits.flags.writeable:
        raise Fault("read-only memory", "a tensor copy writes to a matrix that is read-only")
    inside, outer = _overlap(tensor, x, y)
    bits[outer] = np.ascontiguousarray(box).view(bits.dtype)[inside]


def _bits(tensor: TensorMapLike) -> Array:
    """Return a view of the matrix (rows, columns) as unsigned integers of its elements' size."""
    memory = np.asarray(tensor.array)
    if not memory.flags.c_contiguous:
        raise EmulatorError("a tensor map's array is not contiguous: pass the matrix's plain memory")
    flat = memory.reshape(-1).view(f"u{_BYTES[tensor.dtype]}")
    if flat.size < (tensor.rows - 1) * tensor.pitch + tensor.columns:
        raise Fault(
            "out of bounds",
            f"the tensor map has {tensor.rows} rows at a pitch of {tensor.pitch}, "
            f"and the array {flat.size} elements",
        )
    if flat.ctypes.data % CHUNK:
        raise Fault(
            "tensor map",
            f"the matrix does not start at a multiple of {CHUNK} bytes: copy it to one that does",
        )
    step = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat, (tensor.rows, tensor.columns), (tensor.pitch * step, step), writeable=flat.flags.writeable
    )


def _overlap(tensor: TensorMapLike, x: int, y: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Return where the box at (x, y) overlaps the matrix: as slices of the box, and of the matrix."""
    inside, outer = [], []
    for start, box, extent in ((y, tensor.box_rows, tensor.rows), (x, tensor.box_columns, tensor.columns)):
        first = max(start, 0)
        end = max(first, min(start + box, extent))
        inside.append(slice(first - start, end - start) if end > first else slice(0, 0))
        outer.append(slice(first, end) if end > first else slice(0, 0))
    return (inside[0], inside[1]), (outer[0], outer[1])
