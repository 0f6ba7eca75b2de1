"""A GPU's driver and memory: which GPUs there are, the current one, its stream, arrays, errors in words.

Everything goes through `cuda.bindings.driver`, the driver API one to one, because numba-cuda's own launches
stop at 48 KB of dynamic shared memory and know neither clusters nor tensor maps. If torch uses a GPU, torch
decides which GPU and which stream are current, so kernels run in the order of its work.

A torch tensor is used in place. Memory of our own comes from torch's allocator if torch uses a GPU, so that
both share one pool, and else from the driver's. Both work in the order of the current stream, so memory may
be given back while kernels that use it are still to run.

Source: NVIDIA, CUDA Driver API (sections Context, Memory, Stream Ordered Memory Allocator).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from .device import backend, check_driver, toolkit_major


@dataclass(frozen=True)
class Properties:
    """The properties of a GPU."""

    name: str  # "NVIDIA H200"
    capability: tuple[int, int]  # (9, 0)
    multiprocessors: int
    l2: int  # bytes
    memory: int  # bytes
    shared_per_block: int  # bytes, with the opt-in
    driver: str  # the CUDA version that the driver is for, "13.0"
    pools: bool  # whether it allocates memory in the order of a stream


class Gpu:
    """The driver of this process; `driver` is the module `cuda.bindings.driver` or a fake."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.call("cuInit", 0)
        self.version: int = self.call("cuDriverGetVersion")
        check_driver(self.version, toolkit_major())
        self.count: int = self.call("cuDeviceGetCount")
        self._contexts: dict[int, Any] = {}  # the primary ones, by device
        self._properties: dict[int, Properties] = {}
        self._thread = threading.local()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver and return its result; raise RuntimeError if it fails."""
        error, *values = getattr(self.driver, name)(*arguments)
        if int(error):
            raise self.error(name, error)
        return values[0] if len(values) == 1 else tuple(values)

    def error(self, name: str, error: Any) -> RuntimeError:
        """Return the exception for an error of the driver's function `name`."""
        try:
            words = self.driver.cuGetErrorString(error)[1].decode()
        except Exception:  # a failure here must not hide the error itself
            words = "unknown error"
        label = getattr(error, "name", str(error))
        if label == "CUDA_ERROR_OUT_OF_MEMORY":
            words += ": free arrays and tensors on it, or take smaller matrices"
        return RuntimeError(f"the GPU's driver refused {name} ({label}): {words}")

    def current(self) -> int:
        """Return the current GPU, torch's if it uses one; make its primary context current if none is."""
        device = self._current_device()
        if not getattr(self._thread, "ready", False):
            if not int(self.call("cuCtxGetCurrent")):
                if device not in self._contexts:
                    handle = self.call("cuDeviceGet", device)
                    self._contexts[device] = self.call("cuDevicePrimaryCtxRetain", handle)
                self.call("cuCtxSetCurrent", self._contexts[device])
            self._thread.ready = True
        return device

    def _current_device(self) -> int:
        if self.count == 1:
            return 0
        torch = torch_on_gpu()
        if torch is not None:
            device: int = torch.cuda.current_device()
            return device
        return int(self.call("cuCtxGetDevice")) if int(self.call("cuCtxGetCurrent")) else 0

    def stream(self) -> int:
        """Return the address of the current stream: torch's, or the default one."""
        torch = torch_on_gpu()
        if torch is not None:
            # What torch.cuda.current_stream().cuda_stream is, without the objects made for it.
            stream: int = torch._C._cuda_getCurrentRawStream(self._current_device())
            return stream
        return 0

    def properties(self, device: int) -> Properties:
        """Return the properties of the GPU with this number."""
        if device not in self._properties:
            handle = self.call("cuDeviceGet", device)

            def ask(name: str) -> int:
                which = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
                return int(self.call("cuDeviceGetAttribute", which, handle))

            self._properties[device] = Properties(
                name=self.call("cuDeviceGetName", 128, handle).partition(b"\0")[0].decode(),
                capability=(ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
                multiprocessors=ask("MULTIPROCESSOR_COUNT"),
                l2=ask("L2_CACHE_SIZE"),
                memory=int(self.call("cuDeviceTotalMem", handle)),
                shared_per_block=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
                driver=f"{self.version // 1000}.{self.version % 1000 // 10}",
                pools=bool(ask("MEMORY_POOLS_SUPPORTED")),
            )
        return self._properties[device]

    def here(self) -> Properties:
        """Return the properties of the current GPU."""
        return self.properties(self.current())

    def allocate(self, size: int, stream: int) -> int:
        """Return the address of `size` bytes, valid from `stream`'s next work on; aligned to 256 bytes."""
        if self.here().pools:
            return int(self.call("cuMemAllocAsync", size, self.driver.CUstream(stream)))
        return int(self.call("cuMemAlloc", size))

    def free(self, address: int, stream: int) -> None:
        """Give memory of `allocate` back after the work that `stream` has so far."""
        if self.here().pools:
            self.call("cuMemFreeAsync", self.driver.CUdeviceptr(address), self.driver.CUstream(stream))
        else:
            self.call("cuMemFree", self.driver.CUdeviceptr(address))

    def synchronize(self) -> None:
        """Wait for all work of the current stream; raise RuntimeError if a kernel failed."""
        self.call("cuStreamSynchronize", self.driver.CUstream(self.stream()))


def torch_on_gpu() -> Any:
    """Return torch if this process has used it on a GPU, else None."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def on_device(torch: Any, index: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the GPU with this number is torch's current one."""
    if index == torch.cuda.current_device():
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = torch.cuda.device(index)
    return device


@functools.cache
def get() -> Gpu:
    """Return the driver of this process. Raises RuntimeError if there is no GPU or its driver is too old."""
    return Gpu(importlib.import_module("cuda.bindings.driver"))


def multiprocessors() -> int:
    """Return how many multiprocessors the current GPU has; in the emulator 132, an H100's."""
    if backend() != "gpu":
        return 132
    return get().here().multiprocessors


def shared_memory() -> int:
    """Return the bytes of shared memory that a block may have: 163 KB on an A100, 227 on an H100."""
    if backend() != "gpu":
        return 227 * 1024
    return get().here().shared_per_block


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
        size = math.prod(shape)
        # How Numba passes an array: meminfo, parent, elements, bytes of one, address, shape, strides.
        self.words = (0, 0, size, ITEMSIZE.get(dtype) or np.dtype(dtype).itemsize, address, *shape, *strides)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
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
    torch = torch_on_gpu()
    if torch is not None:
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        return DeviceArray(tensor.data_ptr(), dtype, (count,), (ITEMSIZE[dtype],), tensor)
    block = _Allocation(get(), size)
    return DeviceArray(block.address, dtype, (count,), (ITEMSIZE[dtype],), block)


def upload(x: np.ndarray[Any, Any], into: DeviceArray) -> None:
    """Begin to copy x, which lies in C order, on the current stream; keep x until that is done."""
    g = get()
    g.current()
    to, stream = g.driver.CUdeviceptr(into.address), g.driver.CUstream(g.stream())
    g.call("cuMemcpyHtoDAsync", to, x.ctypes.data, x.nbytes, stream)


def download(x: DeviceArray, pitch: int, into: np.ndarray[Any, Any]) -> None:
    """Copy rows that are `pitch` elements apart, the last too, to a 2-D array, and wait."""
    g = get()
    g.current()
    whole = into.flags.c_contiguous and into.shape[1] == pitch
    rows = into if whole else np.empty((len(into), pitch), into.dtype)
    source, stream = g.driver.CUdeviceptr(x.address), g.driver.CUstream(g.stream())
    g.call("cuMemcpyDtoHAsync", rows.ctypes.data, source, rows.nbytes, stream)
    g.synchronize()
    if not whole:
        into[...] = rows[:, : into.shape[1]]
