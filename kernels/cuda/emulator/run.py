"""Run a kernel's PTX: load its variables, flatten its arguments as Numba does, run the grid in parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from . import instructions  # noqa: F401  (registers them)
from .batch import DTYPES
from .counts import Counts
from .fault import EmulatorError
from .machine import Machine
from .memory import GlobalMemory
from .program import Program
from .ptx import parse
from .schedule import Code, compile_steps

COUNTING: ContextVar[Counts | None] = ContextVar("COUNTING", default=None)  # of `profiled`
LANES = 8192  # of one machine, at most, but for one cluster of blocks: more would fall out of the caches
MEMORY = 1 << 28  # bytes of registers and shared memory of one machine, at most
THREADS = 1024  # of a block, at most, on every GPU
SHARED = 227 * 1024  # bytes of a block, at most, on any GPU so far
VARIABLES = 1 << 33  # where the global and constant variables of a program lie


def run_kernel(
    ptx: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared: int = 0,
    cluster: int = 1,
    counts: Counts | None = None,
    names: Sequence[str] = (),
) -> None:
    """Run the kernel in `ptx` over a grid of blocks, on the arguments' own memory.

    Args:
        ptx: the PTX of one kernel, compiled with Numba's calling convention (abi="numba").
        grid: blocks along x, y and z; missing ones are 1. A size of 0 runs nothing.
        block: threads along x, y and z.
        args: NumPy arrays, tensor maps, and numbers, as the kernel takes them; an array as its plain memory.
        shared: bytes of dynamic shared memory.
        cluster: blocks along x that form a cluster.
        counts: filled with what the kernel did, where given.
        names: of the arguments, for faults.

    Raises Fault for what the kernel does wrong, ValueError and EmulatorError for what cannot be run.
    """
    counts = counts or COUNTING.get()
    whole_grid, whole_block = _three("grid", grid), _three("block", block)
    threads = whole_block[0] * whole_block[1] * whole_block[2]
    if not 1 <= threads <= THREADS:
        raise ValueError(
            f"a block of {whole_block} has {threads} threads: a GPU runs blocks of 1 to {THREADS}"
        )
    blocks = whole_grid[0] * whole_grid[1] * whole_grid[2]
    if whole_grid[0] % cluster:
        raise ValueError(
            f"a grid of {whole_grid} has no whole clusters of {cluster} blocks: round it up to a multiple"
        )
    program = load(ptx)
    if program.shared + shared > SHARED:
        raise ValueError(
            f"a block takes {program.shared + shared} bytes of shared memory, and GPUs give it {SHARED} "
            "at most: use smaller tiles or fewer stages"
        )
    memory = GlobalMemory()
    memory.watch_blocks = not _orders_blocks(program)
    _load_variables(program, memory)
    parameters = _parameters(program, args, memory, names)
    size = _blocks_at_once(program, threads, shared, cluster)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, size):
            count = min(size, blocks - first)
            lanes = count * -(-threads // 32) * 32
            machine = Machine(
                _code(ptx, lanes),
                whole_grid,
                whole_block,
                first,
                count,
                parameters,
                memory,
                shared,
                cluster,
                counts,
            )
            machine.run()


@functools.lru_cache(maxsize=128)
def load(ptx: str) -> Program:
    """Return the program of a PTX text; its variables have their addresses."""
    program = parse(ptx)
    place = VARIABLES
    for variable in program.variables.values():
        if variable.space in ("global", "const"):
            variable.offset = place
            place += -(-max(variable.size, 1) // 256) * 256
    return program


@functools.lru_cache(maxsize=128)
def _code(ptx: str, lanes: int) -> Code:
    return compile_steps(load(ptx), lanes)


def _three(name: str, sizes: Sequence[int] | int) -> tuple[int, int, int]:
    found = (sizes,) if isinstance(sizes, int | np.integer) else tuple(sizes)
    if not 1 <= len(found) <= 3 or any(int(n) != n or n < 0 for n in found):
        raise ValueError(f"{name} is {sizes!r}: pass one to three sizes that are not negative")
    whole = (*(int(n) for n in found), 1, 1)
    return whole[0], whole[1], whole[2]


def _blocks_at_once(program: Program, threads: int, shared: int, cluster: int) -> int:
    """How many blocks a machine gets, a multiple of the cluster."""
    lanes = -(-threads // 32) * 32
    registers = sum(
        rows * (1 if file == "pred" else int(file[1:]) // 8) for file, rows in program.registers.items()
    )
    block = lanes * (registers + program.local) + program.shared + shared
    count = max(1, min(LANES // lanes, MEMORY // max(block, 1)))
    return max(count // cluster, 1) * cluster


def _orders_blocks(program: Program) -> bool:
    """Whether a kernel has what orders the accesses of different blocks: atomics on global memory."""
    return any(
        instruction.opcode[0] in ("atom", "red") and "shared" not in instruction.opcode
        for instruction in program.instructions
    )


def _load_variables(program: Program, memory: GlobalMemory) -> None:
    from .memory import Buffer

    for name, variable in program.variables.items():
        if variable.space in ("global", "const"):
            contents = np.frombuffer(bytearray(variable.contents), np.uint8)
            memory.buffers.append(
                Buffer(variable.offset, contents, f"the variable {name}", variable.space == "global")
            )


def _parameters(
    program: Program, args: Sequence[Any], memory: GlobalMemory, names: Sequence[str]
) -> dict[str, bytes]:
    """Return the bytes of each of the kernel's parameters.

    Numba passes an array as: nothing, nothing, items, bytes of an item, address, shape..., strides....
    """
    flat: list[Any] = []
    for i, arg in enumerate(args):
        name = names[i] if i < len(names) else f"argument {i + 1}"
        if isinstance(arg, np.ndarray):
            described = f"{name} ({arg.dtype} {arg.shape})"
            flat += [0, 0, arg.size, arg.itemsize, memory.add(arg, described), *arg.shape, *arg.strides]
        elif hasattr(arg, "box_rows"):  # a TensorMap: 128 bytes that only the copy engine reads
            address = memory.allocate(np.zeros(128, np.uint8), f"the tensor map {name}", writable=False)
            memory.tensor_maps[address] = arg
            flat += [0, 0, 128, 1, address, 128, 1]
        elif isinstance(arg, complex | np.complexfloating):
            flat += [arg.real, arg.imag]
        else:
            flat.append(arg)
    if len(flat) != len(program.parameters):
        raise EmulatorError(
            f"the kernel takes {len(program.parameters)} parameters, "
            f"and the {len(args)} arguments make {len(flat)}"
        )
    return {
        name: _bits(value, kind, size)
        for (name, (kind, size)), value in zip(program.parameters.items(), flat, strict=True)
    }


def _bits(value: Any, kind: str, size: int) -> bytes:
    if isinstance(value, float | np.floating):
        as_float = {8: np.float64, 4: np.float32, 2: np.float16}[size]
        return np.array(value, as_float).tobytes()
    if kind in DTYPES and DTYPES[kind].kind == "f":
        return np.array(value, DTYPES[kind]).tobytes()
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")
