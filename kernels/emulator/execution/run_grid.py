"""Run a kernel's PTX: check the launch, load variables and arguments, and run the grid in parts.

Each machine holds some blocks of the grid. Machines run one after another, since a kernel must be right for
any order of its blocks. But blocks that are on a GPU at the same time may wait for each other, through flags
in global memory or at a barrier of the whole grid. So a machine that cannot go on is set aside and the next
one starts. Waiting machines try again when memory has changed. The run ends in a fault when more blocks wait
than a GPU holds at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..accesses import async_accesses, loads_and_stores  # noqa: F401
from ..instructions import (  # noqa: F401  (these register the instructions)
    async_copies,
    atomics,
    emulated_wgmma,
    linked_functions,
    mma,
    register_pool,
    tensor_copies,
    warps,
)
from ..machine.counts import Counts
from ..machine.global_memory import Buffer, GlobalMemory
from ..machine.machine_state import MULTIPROCESSORS, Launch, Machine
from ..ptx.fault import Fault
from ..ptx.program import Program
from ..ptx.reader import parse
from ..synchronization import block_barriers, clusters, mbarriers  # noqa: F401
from .kernel_arguments import parameters
from .lane_scheduler import LaneScheduler
from .schedule import Code, batch_size, compile_steps


def run_grid(launch: Launch, machines: Iterator[LaneScheduler]) -> None:
    """Run all machines of a launch to their end. Raises Fault, also for blocks that wait for ever."""
    waiting: list[LaneScheduler] = []
    for scheduler in machines:
        waiting = _retry(launch, waiting)
        if scheduler.run():
            continue
        waiting.append(scheduler)
        held = sum(one.machine.blocks for one in waiting)
        if held > launch.blocks_at_once:
            _give_up(
                waiting[0],
                f"; they may wait for blocks that cannot start: a GPU of {MULTIPROCESSORS} multiprocessors "
                f"holds {launch.blocks_at_once} blocks of this kernel at a time, and the grid has "
                f"{launch.blocks}",
            )
    if waiting := _retry(launch, waiting):
        _give_up(waiting[0], "")


def _retry(launch: Launch, waiting: list[LaneScheduler]) -> list[LaneScheduler]:
    """Run waiting machines again as long as memory changes; return those that still wait."""
    while any(scheduler.seen_changes != launch.memory.changes for scheduler in waiting):
        waiting = [scheduler for scheduler in waiting if not scheduler.run()]
    return waiting


def _give_up(scheduler: LaneScheduler, more: str) -> None:
    verdict = scheduler.verdict
    assert verdict is not None
    raise Fault(verdict.kind, verdict.message + more, verdict.where, verdict.instruction)


COUNTING: ContextVar[Counts | None] = ContextVar("COUNTING", default=None)  # of `profiled`
# The size of one machine, unless a single cluster of blocks is larger.
LANES = 8192  # more would fall out of the caches
MEMORY = 1 << 28  # bytes of registers and shared memory
# Limits of every GPU (CUDA C++ Programming Guide, "Technical Specifications").
THREADS = 1024  # in a block
CLUSTER = 16  # blocks in a cluster
BLOCK, GRID = (1024, 1024, 64), (2**31 - 1, 65535, 65535)
SHARED = 227 * 1024  # bytes of a block, on any GPU so far
LOCAL = 512 * 1024  # bytes of a thread
# Of cuda.jit(debug=True): where a kernel stores the first exception that it raises. Without debug, a thread
# that raises one just ends.
ERROR = "__errcode__"  # the end of the variable's name


def run_kernel(
    ptx: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared: int = 0,
    cluster: int = 1,
    names: Sequence[str] = (),
) -> None:
    """Run the one kernel in `ptx`, compiled with Numba's calling convention (abi="numba"), as `launch` does.

    A grid with a size of 0 runs nothing. names: of the arguments, for faults. Raises Fault for what the
    kernel does wrong, ValueError and EmulatorError for what cannot run.
    """
    whole_grid, whole_block = sizes("grid", grid), sizes("block", block)
    threads = whole_block[0] * whole_block[1] * whole_block[2]
    if not 1 <= threads <= THREADS:
        raise ValueError(
            f"a block of {whole_block} has {threads} threads: a GPU runs blocks of 1 to {THREADS}"
        )
    for name, given, most in (("grid", whole_grid, GRID), ("block", whole_block, BLOCK)):
        if any(n > limit for n, limit in zip(given, most, strict=True)):
            raise ValueError(f"{name} is {given}: a GPU takes at most {most} along x, y and z")
    if not isinstance(shared, int | np.integer) or shared < 0:
        raise ValueError(f"shared is {shared!r}: pass the bytes of dynamic shared memory, 0 or more")
    if not isinstance(cluster, int | np.integer) or not 1 <= cluster <= CLUSTER:
        raise ValueError(f"cluster is {cluster!r}: pass 1 to {CLUSTER} blocks")
    if whole_grid[0] % cluster:
        raise ValueError(
            f"a grid of {whole_grid} has no whole clusters of {cluster} blocks: round it up to a multiple"
        )
    program = parse(ptx)
    if program.shared + shared > SHARED:
        raise ValueError(
            f"a block takes {program.shared + shared} bytes of shared memory, and GPUs give it {SHARED} "
            "at most: use smaller tiles or fewer stages"
        )
    if program.local > LOCAL:
        raise ValueError(
            f"a thread takes {program.local} bytes of local memory, and GPUs give it {LOCAL} at most"
        )
    memory = GlobalMemory()
    memory.watch_blocks = not program.flow.global_atomic_results_used
    flat = parameters(program, args, memory, names)
    stored = program.flow.stored
    memory.watch(None if stored is None else [int.from_bytes(flat[name], "little") for name in stored])
    _load_variables(program, memory)
    launch = Launch(program, whole_grid, whole_block, flat, memory, shared, cluster, COUNTING.get())
    size = _blocks_of_a_machine(program, threads, shared, cluster)
    with np.errstate(all="ignore"):
        run_grid(launch, (_scheduler(ptx, launch, first, size) for first in range(0, launch.blocks, size)))


def _scheduler(ptx: str, launch: Launch, first: int, size: int) -> LaneScheduler:
    """Return what runs the blocks from `first` on, at most `size` of them."""
    blocks = min(size, launch.blocks - first)
    code = _code(ptx, batch_size(blocks * -(-launch.threads // 32) * 32))
    return LaneScheduler(Machine(code.registers, launch, first, blocks), code)


@functools.lru_cache(maxsize=128)
def _code(ptx: str, largest: int) -> Code:
    return compile_steps(parse(ptx), largest)


def sizes(name: str, given: Sequence[int] | int) -> tuple[int, int, int]:
    """Return the sizes of a grid or a block along x, y and z; ValueError if `given` is neither."""
    found = (given,) if isinstance(given, int | np.integer) else given
    if (
        not isinstance(found, Sequence | np.ndarray)
        or not 1 <= len(found) <= 3
        or any(not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 0 for n in found)
    ):
        raise ValueError(f"{name} is {given!r}: pass one to three sizes, whole and not negative")
    whole = (*(int(n) for n in found), 1, 1)
    return whole[0], whole[1], whole[2]


def _blocks_of_a_machine(program: Program, threads: int, shared: int, cluster: int) -> int:
    """Return how many blocks one machine gets: a multiple of the cluster."""
    lanes = -(-threads // 32) * 32
    registers = sum(
        rows * (1 if file == "pred" else int(file[1:]) // 8) for file, rows in program.registers.items()
    )
    block = lanes * (registers + program.local) + program.shared + shared
    count = max(1, min(LANES // lanes, MEMORY // max(block, 1)))
    return max(count // cluster, 1) * cluster


def _load_variables(program: Program, memory: GlobalMemory) -> None:
    for name, variable in program.variables.items():
        if variable.space in ("global", "const"):
            contents = np.frombuffer(bytearray(variable.contents), np.uint8)
            named, writable = f"the variable {name}", variable.space == "global"
            raises = name.endswith(ERROR)
            memory.buffers.append(Buffer(variable.offset, contents, named, writable, raises=raises))
