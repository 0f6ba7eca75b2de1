"""`launch` and `profile`: run any Numba kernel in the emulator, and see what it does.

Write and decorate the kernel as for a GPU, and pass NumPy arrays:

    from numba import cuda
    from minidist.kernels.emulator import launch, profile, profiled

    @cuda.jit
    def scale(x, factor):
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= factor

    x = np.ones(1000, np.float32)
    launch(scale, 4, 256, x, np.float32(2))
    print(profile(scale, 4, 256, x, np.float32(2)))

    with profiled() as counts:  # of all kernels that run meanwhile, those of a rung say
        rung("s3_shared_tile").matmul(a, b)
    print(counts)
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..cuda.runtime.compiler import compile_ptx
from ..cuda.runtime.kernel import Kernel
from ..cuda.runtime.matrix import TensorMap
from .execution.run_grid import COUNTING, run_kernel, sizes
from .machine.counts import SECTOR, Counts, LineCounts
from .ptx.fault import EmulatorError

ARCHITECTURE = "sm_90a"  # the emulator knows its instructions
_COMPILED: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()


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
        kernel: a function, plain or decorated with `numba.cuda.jit`, or a Kernel of the ladder.
        grid: blocks along x, or along x, y and z.
        block: threads of a block along x, or along x, y and z; 1024 in all at most.
        args: NumPy arrays, torch tensors on the CPU, and numbers; the kernel writes arrays in place.
        shared: bytes of dynamic shared memory (`cuda.shared.array(0, dtype)`).
        cluster: blocks along x that form a cluster.
        architecture: the GPU architecture to compile for.

    Raises Fault, with file and line, for an access out of bounds or misaligned, a read of unwritten shared
    memory, a race between warps, a barrier that not all threads reach. Raises EmulatorError for an unknown
    instruction, TypeError and ValueError for arguments that no kernel takes, and Numba's own errors for code
    that it can't compile.
    """
    function = _function(kernel)
    names = _names(function, len(args))
    arrays = tuple(_argument(name, x) for name, x in zip(names, args, strict=True))
    options = getattr(kernel, "targetoptions", {})
    fastmath = bool(options.get("fastmath", getattr(kernel, "fastmath", False)))
    if isinstance(kernel, Kernel):
        arrays = kernel.host_arguments(arrays)
        types = kernel.types(arrays)
    else:
        types = tuple(_type(name, x) for name, x in zip(names, arrays, strict=True))
    whole_grid, whole_block = sizes("grid", grid), sizes("block", block)
    threads = min(max(math.prod(whole_block), 1), 1024)
    debug = bool(options.get("debug", False))
    ptx = _compiled_ptx(function, types, architecture, threads, fastmath, debug)
    run_kernel(ptx, whole_grid, whole_block, arrays, shared, cluster, names=names)


def profile(
    kernel: Callable[..., Any],
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *args: Any,
    shared: int = 0,
    cluster: int = 1,
    architecture: str = ARCHITECTURE,
) -> Profile:
    """Run a kernel as `launch` does, and return a table of what it did, in total and by source line."""
    with profiled(getattr(_function(kernel), "__name__", "kernel")) as counts:
        launch(kernel, grid, block, *args, shared=shared, cluster=cluster, architecture=architecture)
    return counts


@contextlib.contextmanager
def profiled(name: str = "kernels") -> Iterator[Profile]:
    """Count what all kernels do that this thread runs in the emulator inside the `with` block."""
    counts = Counts()
    before = COUNTING.set(counts)
    try:
        yield Profile(counts, name)
    finally:
        COUNTING.reset(before)


def _function(kernel: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(kernel, "py_func", getattr(kernel, "function", kernel))
    if not inspect.isfunction(function):
        raise TypeError(
            f"kernel is a {type(kernel).__name__}: pass a function, plain or decorated with cuda.jit"
        )
    if getattr(kernel, "targetoptions", {}).get("device"):
        raise TypeError(
            f"{function.__name__} is a device function, which only kernels call: leave device=True out"
        )
    return function


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a kernel's arguments. Raises TypeError if it takes another number of them."""
    found = list(inspect.signature(function).parameters.values())
    if any(one.kind is one.VAR_POSITIONAL for one in found):
        return [f"argument {i + 1}" for i in range(count)]
    if len(found) != count:
        defaults = any(one.default is not one.empty for one in found)
        more = "; Numba takes no default values for a kernel's arguments: pass them all" if defaults else ""
        raise TypeError(
            f"{function.__name__} takes {len(found)} arguments ({', '.join(one.name for one in found)}), "
            f"and {count} were passed{more}"
        )
    return [one.name for one in found]


def _argument(name: str, x: Any) -> Any:
    if type(x).__module__.partition(".")[0] == "torch":
        if x.device.type != "cpu":
            raise TypeError(f"{name} is a tensor on {x.device}: pass {name}.cpu()")
        return x.detach().numpy()
    if isinstance(x, tuple):
        items = [_argument(f"{name}[{i}]", item) for i, item in enumerate(x)]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, np.ndarray | np.generic | int | float | complex | bool | enum.Enum | TensorMap):
        return x
    raise TypeError(
        f"{name} is a {type(x).__name__}: "
        "a kernel takes NumPy arrays, tensors on the CPU, numbers, and tuples of these"
    )


def _type(name: str, x: Any) -> Any:
    """Return Numba's type of an argument, as `cuda.jit` launches choose it."""
    try:
        return importlib.import_module("numba.cuda.typing.typeof").typeof(x)
    except ValueError as error:
        raise TypeError(f"{name} is {x!r}, which Numba takes for no kernel: {error}") from error


def _compiled_ptx(
    function: Callable[..., Any],
    types: tuple[Any, ...],
    architecture: str,
    threads: int,
    fastmath: bool,
    debug: bool,
) -> str:
    """Return the PTX of a kernel. As in Numba, values of its closure are fixed by the first launch."""
    kept = _COMPILED.setdefault(function, {})
    key = (types, architecture, threads, fastmath, debug)
    if key not in kept:
        try:
            kept[key] = compile_ptx(function, types, architecture, threads, fastmath=fastmath, debug=debug)
        except AttributeError as error:
            if "insert_unresolved_ref" not in str(error):
                raise
            raise EmulatorError(
                f"{function.__name__} calls a function that calls itself, which Numba compiles for no GPU: "
                "write it as a loop"
            ) from error
    return kept[key]


@dataclass(frozen=True)
class Profile:
    """The counts of one launch. `print(profile)` shows a table; programs read the attributes."""

    counts: Counts
    kernel: str

    @property
    def total(self) -> LineCounts:
        """The sum over all lines: requests, sectors, bytes, shared passes, matrix instructions."""
        return self.counts.total

    @property
    def instructions(self) -> dict[str, int]:
        """Warp instructions by class, the most frequent first."""
        return dict(self.counts.classes.most_common())

    @property
    def lines(self) -> dict[str, LineCounts]:
        """The counts of each line of source, by "file:line"."""
        return dict(self.counts.lines)

    @property
    def sectors_per_load(self) -> float:
        """32-byte sectors for each warp's load from global memory: 4 for neighbouring 4-byte words."""
        return _ratio(self.total.load_sectors, self.total.loads)

    @property
    def sectors_per_store(self) -> float:
        """32-byte sectors for each warp's store to global memory."""
        return _ratio(self.total.store_sectors, self.total.stores)

    @property
    def load_efficiency(self) -> float:
        """Bytes that threads read over bytes moved: 1 is perfect; shared sectors give more."""
        return _ratio(self.total.load_bytes, self.total.load_sectors * SECTOR)

    @property
    def moved(self) -> int:
        """Bytes moved from and to global memory: whole sectors, and what the copy engine loads."""
        sectors = self.total.load_sectors + self.total.store_sectors
        return sectors * SECTOR + self.counts.tensor_bytes

    @property
    def shared_conflicts(self) -> int:
        """Passes through shared memory beyond those of conflict-free requests."""
        return self.total.shared_passes - self.total.shared_least

    def table(self) -> str:
        """Return all figures as text."""
        total, counts, copied = self.total, self.counts, self.counts.copied_bytes
        shared = f"{total.shared_requests}, {total.shared_passes} passes, {self.shared_conflicts} conflicts"
        rows = [
            ("warp instructions", f"{total.instructions}"),
            ("global loads", _requests(total.loads, total.load_sectors, total.load_bytes)),
            ("global stores", _requests(total.stores, total.store_sectors, total.store_bytes)),
            ("shared requests", _or_none(total.shared_requests, shared)),
            ("copied into shared memory", _or_none(copied, f"{copied} bytes, asynchronously")),
            ("matrix instructions", _or_none(total.matrix, f"{total.matrix}, {counts.matrix_flops} FLOP")),
        ]
        width = max(len(name) for name, _ in rows)
        text = [f"{self.kernel}", *(f"  {name:<{width}}  {value}" for name, value in rows), "  by class"]
        text += [f"    {name:<{width}}{count}" for name, count in self.instructions.items()]
        text.append("  by line: instructions, sectors per load, sectors per store, shared passes per request")
        for location, line in sorted(self.lines.items(), key=lambda item: _order(item[0])):
            parts = [
                f"{line.instructions:>9}",
                _cell(line.load_sectors, line.loads),
                _cell(line.store_sectors, line.stores),
                _cell(line.shared_passes, line.shared_requests),
            ]
            text.append(f"    {Path(location).name:<{width}}{'  '.join(parts)}")
        return "\n".join(text)

    def __str__(self) -> str:
        return self.table()


def _order(location: str) -> tuple[str, int]:
    file, _, line = location.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _ratio(above: int, below: int) -> float:
    return above / below if below else 0.0


def _cell(above: int, below: int) -> str:
    return f"{above / below:>7.2f}" if below else f"{'-':>7}"


def _or_none(count: int, text: str) -> str:
    return text if count else "none"


def _requests(count: int, sectors: int, asked: int) -> str:
    if not count:
        return "none"
    moved = sectors * SECTOR
    return f"{count}, {sectors} sectors ({sectors / count:.2f} each), {moved} bytes moved for {asked} asked"
