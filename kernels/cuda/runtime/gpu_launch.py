"""Load a kernel's machine code on a GPU, and launch it.

Everything that stays the same between calls is made once for each kernel, GPU and tuple of argument types:
the loaded code, the layout of its parameters, a buffer for them and the pointers into it. A launch fills the
buffer and calls the driver, which copies it.

Numba flattens an array to meminfo, parent, number of elements, bytes of one, address, shape and strides: 7
parameters of 8 bytes for one dimension, 9 for two (numba-cuda, dispatcher.py, `_prepare_args`).

A tensor map is encoded by the driver, written to the GPU's memory once, and kept for the next launch.
Encoding takes the driver microseconds, and the map has to be in global memory before the kernel runs. Memsets
write its 128 bytes in the order of the stream, so nothing waits and no host memory has to outlive the call.

Source: CUDA Driver API, cuLibraryLoadData, cuKernelSetAttribute, cuLaunchKernel, cuLaunchKernelEx,
cuTensorMapEncodeTiled; CUDA C++ Programming Guide, "Using TMA".
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ..runtime import gpu_driver
from .compiler import Report
from .gpu_driver import DeviceArray, Gpu, allocate, torch_on_gpu
from .matrix import BYTES, SIZE, TensorMap

# Maps, 512 bytes each; the least recently used one goes first. A training step has three for every product,
# and with too few kept each product would encode and write its own again.
KEPT = 4096
_maps: OrderedDict[tuple[Any, ...], DeviceArray] = OrderedDict()
_lock = threading.Lock()


def on_gpu(g: Gpu, x: TensorMap, device: int, stream: int) -> DeviceArray:
    """Return an array of 128 bytes on the GPU that holds the map, for a launch on `stream`.

    The caller keeps it until the launch. While torch captures a graph, the stream's work is recorded and not
    done, and memory belongs to the graph and lives as long; so each graph gets maps of its own.
    """
    captured = stream != 0 and _capturing()  # the default stream is never captured
    # Each stream has its own maps: memory is given back in the order of the stream that it was allocated on.
    what = (x.array.address, x.rows, x.columns, x.pitch, x.box_rows, x.box_columns, x.dtype, x.swizzle)
    key = (what, device, stream)
    with _lock:
        found = _maps.get(key)
        if found is not None and not captured:
            _maps.move_to_end(key)
            return found
        there = allocate(SIZE, "uint8")
        address = there.address
        for word, run in itertools.groupby(encode(g, x)):  # many are 0
            count = len(list(run))
            target = g.driver.CUdeviceptr(address)
            g.call("cuMemsetD32Async", target, word, count, g.driver.CUstream(stream))
            address += 4 * count
        if not captured:
            _maps[key] = there
            if len(_maps) > KEPT:
                _maps.popitem(last=False)
        return there


def _capturing() -> bool:
    torch = torch_on_gpu()
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def encode(g: Gpu, x: TensorMap) -> list[int]:
    """Return the 32 words of the driver's CUtensorMap: sizes, strides and boxes with the columns first."""
    d = g.driver
    size = BYTES[x.dtype]
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{x.swizzle}B' if x.swizzle else 'NONE'}"
    memory = ctypes.create_string_buffer(2 * SIZE)
    start = -ctypes.addressof(memory) % SIZE
    error = _encoder(g)(
        ctypes.addressof(memory) + start,
        getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{x.dtype.upper()}"),
        2,
        x.array.address,
        (ctypes.c_uint64 * 2)(x.columns, x.rows),
        (ctypes.c_uint64 * 1)(x.pitch * size),
        (ctypes.c_uint32 * 2)(x.box_columns, x.box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(d.CUtensorMapSwizzle, swizzle),
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    if error:
        raise g.error(f"cuTensorMapEncodeTiled for {x}", d.CUresult(error))
    return list(struct.unpack_from(f"{SIZE // 4}I", memory, start))


@functools.lru_cache(maxsize=8)
def _encoder(g: Gpu) -> Callable[..., int]:
    """Return the driver's cuTensorMapEncodeTiled.

    It wants the map's memory on 64 bytes (cuda.h declares 128). A CUtensorMap of cuda.bindings, as of version
    13.5, lies on 16, so the driver's answer would depend on where Python put the object.
    """
    address, _ = g.call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    # map, type, rank; address, sizes, strides, box, steps; interleave, swizzle, promotion, fill
    arguments = (pointer, number, number, *[pointer] * 5, *[number] * 4)
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))
    return function


PLAIN_SHARED = 48 * 1024  # bytes of a block's shared memory; for more, a kernel has to opt in
LARGEST_CLUSTER = 8  # blocks, on every GPU that has clusters
PARAMETER = 8  # bytes from one parameter in the buffer to the next
CONFIGURATIONS = 64  # launches with clusters that a kernel remembers
MOST_BLOCKS = (2**31 - 1, 65535, 65535)


def check_grid(name: str, grid: tuple[int, ...]) -> None:
    """Raise ValueError if no GPU takes this grid, of the kernel `name`."""
    if not 1 <= len(grid) <= 3 or any(not 1 <= n <= most for n, most in zip(grid, MOST_BLOCKS, strict=False)):
        raise ValueError(f"the grid of {name} is {grid}: a GPU takes 1 to {MOST_BLOCKS} blocks each way")


class LoadedKernel:
    """A kernel on one GPU, for arguments of one tuple of types."""

    def __init__(
        self,
        g: gpu_driver.Gpu,
        device: int,
        name: str,
        threads: int | tuple[int, ...],
        cubin: bytes,
        report: Report,
        args: tuple[Any, ...],
    ) -> None:
        self.gpu, self.device, self.name, self.report = g, device, name, report
        self.block = (*((threads,) if isinstance(threads, int) else threads), 1, 1)[:3]
        self.properties = g.properties(device)
        try:
            self._library = g.call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        except RuntimeError as error:  # rare: drivers take code of newer toolkits of their major version
            toolkit = f"{self.properties.driver}.*"
            raise RuntimeError(
                f"{error}: if the driver is older than the toolkit, update it, or "
                f"pip install nvidia-nvvm=={toolkit} nvidia-nvjitlink=={toolkit}"
            ) from error
        self._handle = g.call("cuLibraryGetKernel", self._library, self.report.entry.encode())
        # The driver accepts a kernel, which belongs to no context, as a function.
        self._function = g.driver.CUfunction(int(self._handle))
        self._allowed = PLAIN_SHARED - self.report.shared  # bytes of dynamic shared memory
        self._layout = struct.Struct("@" + "".join(_format(x) for x in args))
        self._buffer = ctypes.create_string_buffer(max(self._layout.size, 1))
        start = ctypes.addressof(self._buffer)
        addresses = range(start, start + len(self._buffer), PARAMETER)
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._parameters = ctypes.addressof(self._pointers)
        self._configurations: dict[Any, Any] = {}
        self._lock = threading.Lock()  # one buffer: the driver has copied it when a launch returns

    def launch(
        self, grid: tuple[int, ...], args: tuple[Any, ...], shared: int, cluster: int, stream: int
    ) -> None:
        """Enqueue the kernel on `stream`."""
        values: list[int] = []
        maps = []  # kept until the launch is enqueued
        for x in args:
            if type(x) is DeviceArray:
                values += x.words
            elif type(x) is TensorMap:
                maps.append(on_gpu(self.gpu, x, self.device, stream))
                values += maps[-1].words
            else:
                values.append(x)
        if shared > self._allowed:
            self._allow(shared)
        x, y, z = (*grid, 1, 1)[:3]
        driver = self.gpu.driver
        with self._lock:
            try:
                self._layout.pack_into(self._buffer, 0, *values)
            except struct.error as error:
                raise ValueError(
                    f"an int among the arguments {values} of {self.name} does not fit int32: {error}"
                ) from error
            if cluster == 1:
                (failed,) = driver.cuLaunchKernel(
                    self._function, x, y, z, *self.block, shared, stream, self._parameters, 0
                )
            else:
                configuration = self._configuration((x, y, z), shared, cluster, stream)
                (failed,) = driver.cuLaunchKernelEx(configuration, self._function, self._parameters, 0)
        if failed:
            check_grid(self.name, (x, y, z))
            raise self.gpu.error(
                f"the launch of {self.name} on {(x, y, z)} blocks, {cluster} a cluster", failed
            )

    def _allow(self, shared: int) -> None:
        """Allow the kernel this much dynamic shared memory: above 48 KB in all, it has to ask once."""
        most = self.properties.shared_per_block - self.report.shared
        if shared > most:
            raise ValueError(
                f"kernel {self.name} asks for {shared} bytes of dynamic shared memory, and "
                f"{self.properties.name} has {most} for a block: take smaller tiles or fewer stages"
            )
        which = self.gpu.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = self.gpu.call("cuDeviceGet", self.device)
        self.gpu.call("cuKernelSetAttribute", which, shared, self._handle, device)
        self._allowed = shared

    def _configuration(self, grid: tuple[int, int, int], shared: int, cluster: int, stream: int) -> Any:
        key = (grid, shared, cluster, stream)
        found = self._configurations.get(key)
        if found is not None:
            return found
        if not 1 < cluster <= LARGEST_CLUSTER or grid[0] % cluster:
            raise ValueError(
                f"cluster is {cluster} and the grid is {grid}: a cluster has 1 to {LARGEST_CLUSTER} blocks, "
                "and the grid's x is a multiple of it"
            )
        driver = self.gpu.driver
        dimension = driver.CUlaunchAttribute()
        dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension.value.clusterDim.x = cluster
        dimension.value.clusterDim.y = dimension.value.clusterDim.z = 1
        made = driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = grid
        made.blockDimX, made.blockDimY, made.blockDimZ = self.block
        made.sharedMemBytes = shared
        made.hStream = driver.CUstream(stream)
        made.attrs = [dimension]
        made.numAttrs = 1
        if len(self._configurations) >= CONFIGURATIONS:
            self._configurations.clear()
        self._configurations[key] = made
        return made


def _format(x: Any) -> str:
    """Return the format of an argument's parameters, as `struct` has them, padded to 8 bytes."""
    if isinstance(x, np.generic):
        return f"{x.dtype.char}{8 - x.itemsize}x"
    if isinstance(x, DeviceArray):
        return "QQqqQ" + "q" * 2 * x.ndim
    return "QQqqQqq" if isinstance(x, TensorMap) else "i4x"
