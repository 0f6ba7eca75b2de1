"""The machine: the state of some blocks of a launch, with all their threads side by side in NumPy.

A launch is a kernel with its grid and arguments, and what all its machines share. A lane is a thread. The
lanes of a block follow one another, and lanes that never run fill up its last warp; warp w of the machine has
lanes 32 w to 32 w + 31. `execution.lane_scheduler` decides which lanes run next. Its order is one of many
that a GPU may choose, so races are not left to luck: `clocks` (for shared memory) and `memory` (for global
memory) find every access that another order could have swapped with this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..ptx.dtypes import Array, Lanes
from ..ptx.fault import Fault
from ..ptx.program import Program, PtxInstruction
from .counts import Counts
from .global_memory import GlobalMemory
from .races_in_shared_memory import Clocks
from .shape import MachineShape, Registers

# Limits of an H100 (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MULTIPROCESSORS, THREADS_EACH, BLOCKS_EACH, SHARED_EACH = 132, 2048, 32, 228 * 1024
RESERVED = 1024  # bytes of shared memory that the GPU adds to each block


@dataclass
class Launch:
    """A kernel with its launch configuration, its memory, and the state of the grid's barrier."""

    program: Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: dict[str, bytes]
    memory: GlobalMemory
    shared: int = 0  # bytes of dynamic shared memory
    cluster: int = 1
    counts: Counts | None = None
    arrived: int = 0  # threads that wait at the grid's barrier
    phase: int = 0  # how often the whole grid has met there
    _shapes: dict[int, MachineShape] = field(default_factory=dict)
    _spare: list[Registers] = field(default_factory=list)  # of machines that have ended

    @property
    def blocks(self) -> int:
        """The number of blocks in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """The number of threads in a block."""
        return self.block[0] * self.block[1] * self.block[2]

    def shape(self, blocks: int) -> MachineShape:
        """Return the lanes of a machine with this many blocks."""
        if blocks not in self._shapes:
            self._shapes[blocks] = MachineShape(blocks, self.block)
        return self._shapes[blocks]

    def registers(self, rows: dict[str, int], blocks: int) -> Registers:
        """Return registers for such a machine. They may still hold the values of an ended machine."""
        lanes = self.shape(blocks).lanes
        for spare in self._spare:
            if spare.rows is rows and spare.lanes == lanes:
                self._spare.remove(spare)
                return spare
        return Registers(rows, lanes)

    def give_back(self, registers: Registers) -> None:
        """Keep the registers of an ended machine for the next one."""
        self._spare.append(registers)

    @property
    def blocks_at_once(self) -> int:
        """How many blocks of this kernel an H100 holds at a time."""
        shared = self.program.shared + self.shared + RESERVED
        each = min(BLOCKS_EACH, THREADS_EACH // (-(-self.threads // 32) * 32), SHARED_EACH // shared)
        return MULTIPROCESSORS * max(each, 1)


POISON = 0xFF  # the byte that fresh memory holds: as float32 or float64 it reads as NaN

StateT = TypeVar("StateT")


class Machine:
    """Blocks `first` to `first + blocks` of a launch.

    Instruction units use: `files` and `views` of registers (through a Batch), `shared` (blocks, bytes),
    `memory` (global), `clocks` (happens-before), `counts` (None unless profiling), `state(Class)` for a
    unit's own state, `events` (raise it when waiting lanes may go on), `late` (functions that complete one
    pending operation when no lane can run), and `fault`.
    """

    def __init__(self, registers: dict[str, int], launch: Launch, first: int, blocks: int) -> None:
        self.launch = launch
        self.program = program = launch.program
        self.first, self.blocks, self.cluster = first, blocks, launch.cluster
        self.grid, self.block, self.threads = launch.grid, launch.block, launch.threads
        self.parameters, self.memory, self.counts = launch.parameters, launch.memory, launch.counts
        self.shape = shape = launch.shape(blocks)
        self.warps_per_block, self.warps = shape.warps_per_block, shape.warps
        self.lanes_per_block, self.lanes = shape.lanes_per_block, shape.lanes
        self.block_of_lane: NDArray[np.intp] = shape.block_of_lane
        self.warp_of_lane: NDArray[np.intp] = shape.warp_of_lane
        self.thread_of_lane: NDArray[np.intp] = shape.thread_of_lane  # within its block
        self.alive = shape.is_thread.copy()
        self.full = shape.threads == shape.lanes_per_block  # every lane is a thread, and none has ended
        # Dynamic shared memory begins where the static part ends, aligned.
        starts = [v.offset for v in program.variables.values() if v.space == "shared" and not v.size]
        self.shared_size = max([program.shared, *starts]) + launch.shared
        self.shared_pitch = -(-max(self.shared_size, 16) // 1024) * 1024  # swizzled tiles need 1024 bytes
        self.shared = np.full((blocks, self.shared_pitch), POISON, np.uint8)
        self.local = np.full((self.lanes, -(-program.local // 16) * 16), POISON, np.uint8)
        self.registers = launch.registers(registers, blocks)
        self.files, self.views = self.registers.files, self.registers.views
        self.instruction: PtxInstruction | None = None  # the one that runs, for faults
        self.clocks = Clocks(self)
        self.events = 0
        self.late: list[Callable[[], bool]] = []
        self.states: dict[Any, Any] = {}
        self.specials: dict[tuple[str, str], Array] = {}  # special registers that were read: (name, kind)
        self.has_undefined = False  # some register may hold an undefined value (accesses/undefined_values.py)

    def state(self, kind: Callable[[Machine], StateT]) -> StateT:
        """Return this machine's only object of class `kind`; the first call makes it."""
        if kind not in self.states:
            self.states[kind] = kind(self)
        return self.states[kind]

    def end(self, lanes: Lanes) -> None:
        """Note that these lanes have ended."""
        self.alive &= ~lanes
        self.full = False
        self.events += 1

    def block_name(self, block: int) -> str:
        """Name block `block` of the machine by its index in the grid."""
        i, (x, y, _) = self.first + block, self.grid
        index = (i % x, i // x % y, i // x // y)
        return f"block {index[0] if self.grid[1:] == (1, 1) else index}"

    def thread_name(self, lane: int) -> str:
        """Name the thread of `lane` by its index in its block, and its block."""
        i, (x, y, _) = int(self.thread_of_lane[lane]), self.block
        index = (i % x, i // x % y, i // (x * y))
        name = index[0] if self.block[1:] == (1, 1) else index
        return f"thread {name} of {self.block_name(int(self.block_of_lane[lane]))}"

    def fault(
        self,
        kind: str,
        message: str,
        instruction: PtxInstruction | None = None,
        lanes: Lanes | None = None,
    ) -> NoReturn:
        """Raise a Fault at `instruction` (None: the one that runs) that names the first of `lanes`."""
        raise self.make_fault(kind, message, instruction or self.instruction, lanes)

    def make_fault(
        self,
        kind: str,
        message: str,
        instruction: PtxInstruction | None,
        lanes: Lanes | None = None,
    ) -> Fault:
        """Return such a Fault."""
        who = f" ({self.thread_name(int(np.argmax(lanes)))})" if lanes is not None and lanes.any() else ""
        where = str(instruction.location) if instruction is not None and instruction.location else ""
        return Fault(kind, message + who, where, instruction.text if instruction is not None else "")

    def fault_at(self, kind: str, text: str, lane: int) -> NoReturn:
        """Raise a Fault at the instruction that runs: "thread 3 of block 0 `text`"."""
        self.fault(kind, f"{self.thread_name(lane)} {text}")

    @contextlib.contextmanager
    def located(self, lane: int) -> Iterator[None]:
        """Add the running instruction and the thread to any Fault that the `with` block raises."""
        try:
            yield
        except Fault as fault:
            if fault.instruction:
                raise
            self.fault(fault.kind, fault.message, lanes=np.arange(self.lanes) == lane)
