"""Arrays in a GPU's memory: their address, their owner, and copies from and to NumPy arrays.

A torch tensor is used in place. Memory of our own comes from torch's allocator if torch uses a GPU, so that
both share one pool, and else from the driver's. Both work in the order of the current stream, so memory may
be given back while kernels that use it are still to run.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import gpu_driver

ITEMSIZE = {"uint8": 1, "uint16": 2, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class DeviceArray:
    """An array in a GPU's memory, as kernels take it. `owner` keeps that memory alive."""

    __slots__ = ("address", "dtype", "key", "owner", "shape", "words")

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        owner: object = None,
    ) -> None:
        """`strides` are in bytes."""
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.owner = owner
        self.key = (dtype, len(shape))
        size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        # How Numba passes an array: meminfo, parent, elements, bytes of one, address, shape, strides.
        self.words = (0, 0, size, ITEMSIZE[dtype], address, *shape, *strides)

    @property
    def ndim(self) -> int:
        """The number of dimensions, 1 or 2."""
        return len(self.shape)

    def viewed(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        """Return the same memory with another shape and strides (in bytes)."""
        return DeviceArray(self.address, self.dtype, shape, strides, self.owner)


class _Allocation:
    """Memory from the driver; given back, in the order of its stream, when nobody refers to it."""

    def __init__(self, gpu: Any, size: int) -> None:
        self.gpu, self.stream, self.address = gpu, gpu.stream(), 0
        self.address = gpu.allocate(size, self.stream)

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            self.gpu.free(self.address, self.stream)


def allocate(count: int, dtype: str) -> DeviceArray:
    """Return an uninitialised 1-D array of `count` elements on the current GPU."""
    size = count * ITEMSIZE[dtype]
    torch = gpu_driver.torch_on_gpu()
    if torch is not None:
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        return DeviceArray(tensor.data_ptr(), dtype, (count,), (ITEMSIZE[dtype],), tensor)
    block = _Allocation(gpu_driver.get(), size)
    return DeviceArray(block.address, dtype, (count,), (ITEMSIZE[dtype],), block)


def upload(x: np.ndarray[Any, Any], into: DeviceArray, pitch: int) -> None:
    """Begin to copy x to rows `pitch` elements apart; keep x until the stream is done (see `download`)."""
    g = gpu_driver.get()
    g.copy_2d(x.ctypes.data, x.strides[0], into.address, pitch * x.itemsize, x.shape, x.itemsize, True)


def download(x: DeviceArray, pitch: int, into: np.ndarray[Any, Any]) -> None:
    """Copy rows that are `pitch` elements apart to a 2-D array with contiguous rows, and wait."""
    g = gpu_driver.get()
    size = into.itemsize
    g.copy_2d(into.ctypes.data, into.strides[0], x.address, pitch * size, into.shape, size, False)
    g.synchronize()
