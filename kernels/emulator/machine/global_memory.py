"""Global memory: the arrays passed to a kernel, each at an address of its own.

Addresses are not the host's. Each allocation starts on a multiple of 256 bytes, as a GPU's does, and far from
the next. So misaligned and stray accesses are found wherever NumPy happened to put the array.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ptx.dtypes import Array
from ..ptx.fault import of

FIRST = 1 << 34  # the address of the first allocation
APART = 1 << 34  # bytes between allocations, at least


@dataclass
class Buffer:
    """Memory that a kernel may use: `bytes` at addresses from `start` on."""

    start: int
    bytes: NDArray[np.uint8]
    name: str
    writable: bool
    keep: Any = None  # the owner of the memory
    views: dict[int, Array] = field(default_factory=dict)
    raises: bool = False  # the kernel stores an exception here (debug=True)
    watched: bool = True  # the kernel may write here, so accesses may race
    history: Any = None  # of accesses since the whole grid met: `accesses/races_in_global_memory.py`

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.start + self.bytes.size

    def view(self, width: int) -> Array:
        """Return the bytes as rows of `width`."""
        if width not in self.views:
            rows = self.bytes.size // width
            self.views[width] = self.bytes[: rows * width].view(f"V{width}" if width > 8 else f"u{width}")
        return self.views[width]

    def read(self, offset: Array, width: int) -> Array:
        """Return `width` bytes at each offset, (..., width) uint8. Addresses are multiples of the width."""
        if self.start % width == 0:
            found = self.view(width)[offset >> (width.bit_length() - 1)]
            return found[..., None].view(np.uint8)
        return self.bytes[offset[..., None] + np.arange(width)]

    def write(self, offset: Array, values: Array) -> None:
        """Write values (..., width) uint8 at each offset; of several at one offset, the last stays."""
        width = values.shape[-1]
        if self.start % width == 0:
            rows = self.view(width)
            rows[offset >> (width.bit_length() - 1)] = np.ascontiguousarray(values).view(rows.dtype)[..., 0]
        else:
            self.bytes[offset[..., None] + np.arange(width)] = values

    def element(self, offset: int) -> str:
        """Name the array element at a byte offset; just the byte for an array with gaps."""
        array = self.keep
        if not isinstance(array, np.ndarray) or array.nbytes != self.bytes.size or not array.ndim:
            return f"byte {offset}"
        item = offset // array.itemsize
        if array.flags.c_contiguous or array.flags.f_contiguous:
            order: Any = "C" if array.flags.c_contiguous else "F"
            index = tuple(int(i) for i in np.unravel_index(item, array.shape, order=order))
            return f"element {index[0] if len(index) == 1 else index}"
        return f"byte {offset}"


class GlobalMemory:
    """The buffers of a launch, found by address."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._owners: dict[int, tuple[int, int]] = {}  # by id of the owning array: (address, host address)
        self._next = FIRST
        self._keep: list[Any] = []
        self.watch_blocks = True  # look for races between blocks; not if atomics may order them
        self.changes = 0  # the number of writes, here or in shared memory
        self.tensor_maps: dict[int, Any] = {}  # by address

    def allocate(self, contents: NDArray[np.uint8], name: str, writable: bool = True) -> int:
        """Add new memory with these contents, and return its address."""
        start = self._next
        self._next += -(-contents.size // APART) * APART + APART
        self.buffers.append(Buffer(start, contents, name, writable))
        return start

    def add(self, array: Array, name: str) -> int:
        """Add an array's memory without a copy, so overlaps stay; return its first element's address."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self._keep.append((owner, array))
        low, high = _bounds(array)
        if id(owner) not in self._owners:
            bottom = min(_bounds(owner)[0], low)
            self._owners[id(owner)] = (self._next, bottom)
            self._next += -(-(max(high, bottom + owner.nbytes) - bottom) // APART) * APART + APART
        start, bottom = self._owners[id(owner)]
        if high > low:
            memory = _host_bytes(low, high - low)
            self._insert(Buffer(start + low - bottom, memory, name, array.flags.writeable, array))
        return start + array.ctypes.data - bottom

    def _insert(self, new: Buffer) -> None:
        """Add a buffer, merged with the buffers that it overlaps."""
        for old in [b for b in self.buffers if b.start < new.end and new.start < b.end]:
            if old.start <= new.start and new.end <= old.end and old.writable >= new.writable:
                return
            self.buffers.remove(old)
            low = min((old.start, old), (new.start, new), key=lambda pair: pair[0])[1]
            size = max(old.end, new.end) - low.start
            memory = _host_bytes(low.bytes.ctypes.data, size)
            name = f"{old.name} and {new.name}"
            new = Buffer(low.start, memory, name, old.writable and new.writable, (old, new))
        self.buffers.append(new)

    def find(self, address: Array, width: int) -> list[tuple[Buffer | None, Array | None]]:
        """Return the buffers that hold `width` bytes at each address, each with a mask of its addresses.

        Mask None: all addresses. Buffer None: addresses not wholly inside a buffer.
        """
        low, high = int(address.min()), int(address.max()) + width
        for buffer in self.buffers:
            if buffer.start <= low and high <= buffer.end:
                return [(buffer, None)]
        found: list[tuple[Buffer | None, Array | None]] = []
        rest = np.ones(address.shape, np.bool_)
        for buffer in self.buffers:
            inside = (address >= buffer.start) & (address + width <= buffer.end)
            if inside.any():
                found.append((buffer, inside))
                rest &= ~inside
        return [*found, (None, rest)] if rest.any() else found

    def watch(self, stored: Collection[int] | None) -> None:
        """Watch for races only in buffers that hold one of these addresses; None: in all."""
        for buffer in self.buffers:
            buffer.watched = buffer.writable and (
                stored is None or any(buffer.start <= address < buffer.end for address in stored)
            )

    def order_all(self) -> None:
        """Note that the whole grid has met: all earlier accesses happen before all later ones."""
        self.changes += 1
        for buffer in self.buffers:
            buffer.history = None

    def near(self, address: int) -> str:
        """Describe an address outside of all buffers, for a fault."""
        if not self.buffers:
            return f"address {address:#x}; the kernel was given no arrays"
        nearest = min(self.buffers, key=lambda b: max(b.start - address, address - b.end))
        offset = address - nearest.start
        array, index = nearest.keep, ""
        if isinstance(array, np.ndarray) and array.ndim == 1 and array.nbytes == nearest.bytes.size:
            index = f" (index {offset // array.itemsize} of {array.size} items)"
        if offset >= 0:
            return f"byte {offset} of {nearest.name}, which has {nearest.bytes.size}{index}"
        return f"{of(-offset, 'byte')} before {nearest.name}{index}"


def _bounds(array: Array) -> tuple[int, int]:
    """Return the address of an array's first byte and the address after its last, for any strides."""
    low = high = array.ctypes.data
    if not array.size:
        return low, high
    for extent, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high + array.itemsize


def _host_bytes(address: int, size: int) -> NDArray[np.uint8]:
    """Return `size` bytes of this process's memory as an array. The caller keeps their owner alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
