"""`launch` and `profile`: run any Numba kernel of your own in the emulator, and see what it does.

A kernel is written and decorated as for a GPU, and its arguments are NumPy arrays:

    from numba import cuda
    from minidist.kernels.cuda.emulator import launch, profile, profiled

    @cuda.jit
    def scale(x, factor):
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= factor

    x = np.ones(1000, np.float32)
    launch(scale, 4, 256, x, np.float32(2))
    print(profile(scale, 4, 256, x, np.float32(2)))

    with profiled() as counts:  # whatever runs in the emulator meanwhile, a rung say
        rung("s3_shared_tile").matmul(a, b)
    print(counts)
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import compiler
from .counts import Counts
from .profile import Profile
from .run import COUNTING, run_kernel

ARCHITECTURE = "sm_90a"  # whose instructions the emulator knows


def launch(
    kernel: Callable[..., Any],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *args: Any,
    shared: int = 0,
    cluster: int = 1,
    architecture: str = ARCHITECTURE,
) -> None:
    """Run a Numba kernel on a grid of blocks in the emulator, on the arguments' own memory.

    Args:
        kernel: a function decorated with `numba.cuda.jit`, a plain one, or a Kernel of the ladder.
        grid: blocks along x, or along x, y and z.
        block: threads of a block along x, or along x, y and z; 1024 in all at most.
        args: NumPy arrays, torch tensors on the CPU, and numbers; arrays are written in place.
        shared: bytes of dynamic shared memory (`cuda.shared.array(0, dtype)`).
        cluster: blocks along x that form a cluster.
        architecture: what the kernel is compiled for.

    Raises Fault, with file and line, for what a GPU would not forgive: an access out of bounds or misaligned,
    a read of shared memory that nobody wrote, a race between warps, a barrier that not all threads reach.
    Raises EmulatorError for an instruction that the emulator does not know, TypeError and ValueError for
    arguments that no kernel takes, and Numba's own errors for what it can't compile.
    """
    _run(kernel, grid, block, args, shared, cluster, architecture, None)


def profile(
    kernel: Callable[..., Any],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *args: Any,
    shared: int = 0,
    cluster: int = 1,
    architecture: str = ARCHITECTURE,
) -> Profile:
    """Run a kernel as `launch` does, and return what it did: a table, in all and by line of source."""
    counts = Counts()
    _run(kernel, grid, block, args, shared, cluster, architecture, counts)
    return Profile(counts, getattr(_function(kernel), "__name__", "kernel"))


@contextlib.contextmanager
def profiled(name: str = "kernels") -> Iterator[Profile]:
    """Count what all kernels do that this thread runs in the emulator within the `with` block."""
    counts = Counts()
    before = COUNTING.set(counts)
    try:
        yield Profile(counts, name)
    finally:
        COUNTING.reset(before)


def _run(
    kernel: Callable[..., Any],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    shared: int,
    cluster: int,
    architecture: str,
    counts: Counts | None,
) -> None:
    function = _function(kernel)
    arrays = [_argument(i, x) for i, x in enumerate(args)]
    options = getattr(kernel, "targetoptions", {})
    threads = int(np.prod(block))
    ptx = compiler.compile_ptx(
        function,
        tuple(_type(x) for x in arrays),
        architecture,
        min(max(threads, 1), 1024),
        fastmath=bool(options.get("fastmath", False)),
    )
    run_kernel(
        ptx, _sizes(grid), _sizes(block), arrays, shared, cluster, counts, _names(function, len(arrays))
    )


def _function(kernel: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(kernel, "py_func", getattr(kernel, "function", kernel))
    if not inspect.isfunction(function):
        raise TypeError(
            f"kernel is a {type(kernel).__name__}: pass a function, plain or decorated with cuda.jit"
        )
    return function


def _sizes(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return (int(sizes),) if isinstance(sizes, int | np.integer) else tuple(sizes)


def _names(function: Callable[..., Any], count: int) -> list[str]:
    names = list(inspect.signature(function).parameters)
    return names if len(names) == count else []


def _argument(position: int, x: Any) -> Any:
    if type(x).__module__.partition(".")[0] == "torch":
        if x.device.type != "cpu":
            raise TypeError(f"argument {position + 1} is a tensor on {x.device}: pass tensor.cpu()")
        return x.detach().numpy()
    if isinstance(x, np.ndarray | np.generic | int | float | complex | bool):
        return x
    raise TypeError(
        f"argument {position + 1} is a {type(x).__name__}: a kernel takes NumPy arrays, tensors and numbers"
    )


def _type(x: Any) -> Any:
    """Return Numba's type of an argument: that of `cuda.jit`'s own launches."""
    typeof = importlib.import_module("numba.cuda.typing.typeof").typeof
    found = typeof(x)
    types = importlib.import_module("numba.cuda.types")
    if isinstance(found, types.Array) and not found.aligned:
        raise TypeError("an array is not aligned to its items: pass numpy.require(array, requirements='A')")
    return found
