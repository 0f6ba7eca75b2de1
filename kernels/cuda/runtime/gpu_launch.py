"""Load a kernel's machine code on a GPU, and launch it.

Everything that stays the same between calls is made once for each kernel, GPU and tuple of argument types:
the loaded code, the layout of its parameters, a buffer for them and the pointers into it. A launch fills the
buffer and calls the driver, which copies it.

Numba flattens an array to meminfo, parent, number of elements, bytes of one, address, shape and strides: 7
parameters of 8 bytes for one dimension, 9 for two (numba-cuda, dispatcher.py, `_prepare_args`).

Source: CUDA Driver API, cuLibraryLoadData, cuKernelSetAttribute, cuLaunchKernel, cuLaunchKernelEx.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from . import gpu_driver
from .assembler_report import Report
from .gpu_memory import DeviceArray
from .gpu_tensor_maps import on_gpu
from .tensor_map import TensorMap

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
        threads: int,
        cubin: bytes,
        report: Report,
        args: tuple[Any, ...],
    ) -> None:
        self.gpu, self.device, self.name, self.threads, self.report = g, device, name, threads, report
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
                    self._function, x, y, z, self.threads, 1, 1, shared, stream, self._parameters, 0
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
        made.blockDimX, made.blockDimY, made.blockDimZ = self.threads, 1, 1
        made.sharedMemBytes = shared
        made.hStream = driver.CUstream(stream)
        made.attrs = [dimension]
        made.numAttrs = 1
        if len(self._configurations) >= CONFIGURATIONS:
            self._configurations.clear()
        self._configurations[key] = made
        return made


def _format(x: Any) -> str:
    """Return the format of an argument's parameters, as `struct` has them; an int is padded to 8 bytes."""
    if isinstance(x, DeviceArray):
        return "QQqqQ" + "q" * 2 * x.ndim
    return "QQqqQqq" if isinstance(x, TensorMap) else "i4x"
