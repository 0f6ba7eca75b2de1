"""A kernel: a function in Numba's Python with everything its launch needs, compiled at the first launch.

    SCALE = Kernel(scale, threads=256)
    SCALE.launch((blocks,), x, factor, n)

Its arguments and `device.backend` decide where it runs: with arrays in a GPU's memory, its machine code runs
there; with NumPy arrays, its PTX runs in the emulator. A kernel is compiled for the types of its arguments:
int32 for an int, `dtype[::1]` for a 1-D array, any strides for a 2-D array, uint8[::1] for a tensor map.
float16 and bfloat16 travel as uint16, since Numba has no bfloat16 in shared memory; the instructions know
what they mean.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import compiler, gpu_driver
from .compiler import Report
from .device import architecture_on, backend, capability
from .gpu_driver import DeviceArray
from .gpu_launch import LoadedKernel, check_grid
from .matrix import TensorMap

HALVES = ("float16", "bfloat16")
LARGEST_INT = 2**31 - 1


@dataclass(frozen=True)
class Compiled:
    """A kernel for one tuple of types and one architecture. Each part is made when it is first used."""

    kernel: Kernel
    types: tuple[Any, ...]  # Numba's
    architecture: str

    @functools.cached_property
    def ptx(self) -> str:
        """The PTX: what the emulator executes."""
        return compiler.compile_ptx(*self._arguments())

    @property
    def cubin(self) -> bytes:
        """The machine code, linked from LTO-IR: what a GPU runs."""
        return self._linked[0]

    @property
    def report(self) -> Report:
        """The assembler's report."""
        return self._linked[1]

    @functools.cached_property
    def _linked(self) -> tuple[bytes, Report]:
        return compiler.compile_cubin(*self._arguments())

    def _arguments(self) -> tuple[Any, ...]:
        k = self.kernel
        return k.function, self.types, self.architecture, k.threads, k.blocks


@dataclass(frozen=True)
class Kernel:
    """A kernel and its launch bounds. Nothing is compiled before it is needed."""

    function: Callable[..., None]  # values in its closure and globals are compiled in as constants
    threads: int  # in a block, which has one dimension
    blocks: int = 1  # at least this many must fit a multiprocessor, which limits the registers of a thread
    architecture: str = "sm_75"  # the oldest on which it runs
    # Kept between launches, by the arguments' types: compiled code, and kernels loaded on a GPU.
    _ready: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        capability(self.architecture)
        if not 1 <= self.threads <= 1024 or self.blocks < 1:
            raise ValueError(
                f"threads is {self.threads} and blocks is {self.blocks}: pass 1 to 1024, and 1 or more"
            )

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    def launch(
        self,
        grid: tuple[int, ...],
        *args: Any,
        shared: int = 0,
        cluster: int = 1,
        stream: int | None = None,
    ) -> None:
        """Run the kernel on a grid (x, y, z) of blocks; y and z are 1 unless given.

        `args` are ints (as int32), 1-D or 2-D arrays, and tensor maps. `shared` is dynamic shared memory in
        bytes, also above 48 KB. `cluster` blocks along x form a cluster. On a GPU this returns before the
        kernel has run; it runs on `stream` (a CUstream's address), or on torch's current one.

        Raises TypeError for another kind of argument, ValueError for an int beyond int32, RuntimeError if
        this GPU can't run the kernel.
        """
        for x in args:  # the first array decides; that is faster than asking `backend`
            if type(x) is TensorMap:
                x = x.array
            if type(x) is DeviceArray:
                self._launch_on_gpu(grid, args, shared, cluster, stream)
                return
        if backend() == "gpu":
            self._launch_on_gpu(grid, args, shared, cluster, stream)
            return
        check_grid(self.name, grid)
        arrays = self.host_arguments(args)
        from ...emulator.execution.run_grid import run_kernel

        ptx = self.compile(self.types(arrays), self.architecture).ptx
        run_kernel(ptx, grid, (self.threads,), arrays, shared, cluster, names=self._names)

    def _launch_on_gpu(
        self, grid: tuple[int, ...], args: tuple[Any, ...], shared: int, cluster: int, stream: int | None
    ) -> None:
        g = gpu_driver.get()
        device = g.current()
        key = (device, *[x.key if type(x) is DeviceArray else type(x) for x in args])
        loaded: LoadedKernel | None = self._ready.get(key)
        if loaded is None:
            loaded = self._ready[key] = self._load(g, device, args)
        loaded.launch(grid, args, shared, cluster, g.stream() if stream is None else stream)

    def _load(self, g: gpu_driver.Gpu, device: int, args: tuple[Any, ...]) -> LoadedKernel:
        for i, x in enumerate(args):
            if not isinstance(x, (DeviceArray, TensorMap, int, np.integer)):
                raise TypeError(
                    f"argument {i} of {self.name} is a {type(x).__name__}: "
                    "pass an int, an array on the GPU or a tensor map"
                )
        gpu = g.properties(device)
        architecture = architecture_on(self.architecture, gpu.capability, f"kernel {self.name}", gpu.name)
        compiled = self.compile(self.types(args), architecture)
        return LoadedKernel(g, device, self.name, self.threads, compiled.cubin, compiled.report, args)

    def compile(self, types: tuple[Any, ...], architecture: str) -> Compiled:
        """Return the kernel for arguments of these Numba types on `architecture`, as in "sm_90a"."""
        key = (types, architecture)
        if key not in self._ready:
            self._ready[key] = Compiled(self, types, architecture)
        compiled: Compiled = self._ready[key]
        return compiled

    def host_arguments(self, args: Iterable[Any]) -> tuple[Any, ...]:
        """Return arguments as the emulator takes them, or raise what is wrong with one of them."""
        return tuple(_host_argument(self.name, i, x) for i, x in enumerate(args))

    def types(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the Numba types of these arguments."""
        return tuple(_numba_type(x) for x in args)

    @functools.cached_property
    def _names(self) -> list[str]:
        """The names of the arguments, for the emulator's error messages."""
        return list(inspect.signature(self.function).parameters)


def numba_type(dtype: str, dimensions: int) -> Any:
    """Return Numba's type of an array: contiguous with one dimension, any strides with two."""
    types: Any = importlib.import_module("numba.cuda.types")
    element = getattr(types, "uint16" if dtype in HALVES else dtype)
    return types.Array(element, dimensions, "C" if dimensions == 1 else "A")


def _numba_type(x: Any) -> Any:
    if isinstance(x, TensorMap):
        return numba_type("uint8", 1)
    if isinstance(x, int):
        return importlib.import_module("numba.cuda.types").int32
    return numba_type(str(x.dtype), x.ndim)


def _host_argument(kernel: str, position: int, x: Any) -> Any:
    """Return the argument as the emulator takes it, or raise what is wrong with it."""
    if isinstance(x, np.ndarray):
        if x.ndim == 1 and not x.flags.c_contiguous:
            raise TypeError(
                f"argument {position} of {kernel} is a 1-D array with gaps: "
                "pass numpy.ascontiguousarray of it, or a 2-D view"
            )
        if x.ndim not in (1, 2):
            raise TypeError(f"argument {position} of {kernel} has {x.ndim} dimensions: pass 1 or 2")
        return x.view(np.uint16) if x.dtype.name in HALVES else x
    if isinstance(x, TensorMap):
        return x
    if isinstance(x, (int, np.integer)):
        if not -LARGEST_INT - 1 <= x <= LARGEST_INT:
            raise ValueError(f"argument {position} of {kernel} is {x}: a kernel takes what int32 can hold")
        return int(x)
    raise TypeError(
        f"argument {position} of {kernel} is a {type(x).__name__}: pass an int, a NumPy array or a tensor map"
    )
