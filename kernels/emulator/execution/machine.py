"""The machine: some blocks of a launch, all their threads side by side in NumPy.

A lane is a thread. Lanes of a block follow one another, its last warp filled up with lanes that never run;
warp w of the machine has lanes 32 w to 32 w + 31. Lanes that stand at the same instruction run together,
whatever warp or block they belong to (`fronts`). What order real warps would run in is not decided by this:
what may go wrong in another order is found by `clocks`, not by luck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.instruction_registry import Array
from ..memory.undefined_values import Undefined
from ..ptx.fault import Fault
from ..ptx.program import Program, PtxInstruction
from ..synchronization.races_in_shared_memory import Clocks
from .grid import Launch
from .lane_scheduler import Fronts
from .schedule import Code

POISON = 0xFF  # what memory holds that nobody wrote: as a float32 or a float64, NaN

StateT = TypeVar("StateT")


class Machine:
    """Blocks `first` to `first + blocks` of a launch.

    What units use: `files` and `views` of registers (through a Batch), `shared` (blocks, bytes), `memory`
    (global), `clocks` (happens-before), `counts` (None unless profiling), `state(Class)` for what a unit
    keeps, `events` (raised by whatever may let waiting lanes go on), `late` (functions that complete one
    pending operation when no lane can run), and `fault`.
    """

    launch: Launch
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int
    warps_per_block: int
    thread_of_lane: NDArray[np.intp]
    shared_size: int

    def __init__(self, code: Code, launch: Launch, first: int, blocks: int) -> None:
        self.code, self.program, self.launch = code, code.program, launch
        self.first, self.blocks, self.cluster = first, blocks, launch.cluster
        self.grid, self.block, self.threads = launch.grid, launch.block, launch.threads
        self.parameters, self.memory, self.counts = launch.parameters, launch.memory, launch.counts
        self.shape = shape = launch.shape(blocks)
        self.warps_per_block, self.warps = shape.warps_per_block, shape.warps
        self.lanes_per_block, self.lanes = shape.lanes_per_block, shape.lanes
        self.block_of_lane, self.warp_of_lane = shape.block_of_lane, shape.warp_of_lane
        self.thread_of_lane = shape.thread_of_lane  # within its block
        self.alive = shape.is_thread.copy()
        self.full = shape.threads == shape.lanes_per_block
        self.shared_size = _shared_size(self.program) + launch.shared
        self.shared_pitch = -(-max(self.shared_size, 16) // 1024) * 1024  # what descriptors count on
        self.shared = np.full((blocks, self.shared_pitch), POISON, np.uint8)
        self.local = np.full((self.lanes, -(-self.program.local // 16) * 16), POISON, np.uint8)
        self.registers = launch.registers(code, blocks)
        self.files, self.views = self.registers.files, self.registers.views
        self.clocks = Clocks(self)
        self.events = 0
        self.late: list[Callable[[], bool]] = []
        self._states: dict[type[Any], Any] = {}
        self.specials: dict[tuple[str, str], Array] = {}  # what was read of special registers
        self.undefined: Undefined | None = None  # values that no lane may use, once there are any
        self.fronts = Fronts(self)
        self.instruction: PtxInstruction | None = None  # the one that runs, for faults
        self.saw = -1  # memory's changes when this machine last ran

    def state(self, kind: Callable[[Machine], StateT]) -> StateT:
        """Return this machine's one object of class `kind`, made with the machine when first asked for."""
        if kind not in self._states:
            self._states[kind] = kind(self)  # type: ignore[index]
        found: StateT = self._states[kind]  # type: ignore[index]
        return found

    def run(self) -> bool:
        """Run all lanes to their end, or until none can go on; return whether they ended. Raises Fault.

        In the second case, call again when other blocks have written memory: somebody may wait for that. If
        nobody has, `verdict` says what is wrong.
        """
        ended = self.fronts.run()
        self.saw = self.memory.changes
        if ended:
            for state in list(self._states.values()):
                if finish := getattr(state, "finish", None):
                    finish()
            self.launch.give_back(self.registers)
        return ended

    @property
    def verdict(self) -> Fault | None:
        """What is wrong where nobody can go on."""
        return self.fronts.verdict

    def end(self, lanes: NDArray[np.bool_]) -> None:
        """Note that these lanes have come to their end."""
        self.alive &= ~lanes
        self.full = False
        self.events += 1

    def block_name(self, block: int) -> str:
        """Name block `block` of the machine by its place in the grid."""
        index = self.first + block
        place = (
            index % self.grid[0],
            index // self.grid[0] % self.grid[1],
            index // self.grid[0] // self.grid[1],
        )
        return f"block {place[0] if self.grid[1:] == (1, 1) else place}"

    def thread_name(self, lane: int) -> str:
        """Name the thread of `lane` by its place in its block and in the grid."""
        thread = int(self.thread_of_lane[lane])
        x, y = self.block[0], self.block[1]
        place = (thread % x, thread // x % y, thread // (x * y))
        name = place[0] if self.block[1:] == (1, 1) else place
        return f"thread {name} of {self.block_name(int(self.block_of_lane[lane]))}"

    def fault(
        self,
        kind: str,
        message: str,
        instruction: PtxInstruction | None = None,
        lanes: NDArray[np.bool_] | None = None,
    ) -> NoReturn:
        """Raise the Fault `kind` at `instruction` (else the one that runs), naming the first of `lanes`."""
        raise self.make_fault(kind, message, instruction or self.instruction, lanes)

    def make_fault(
        self,
        kind: str,
        message: str,
        instruction: PtxInstruction | None,
        lanes: NDArray[np.bool_] | None = None,
    ) -> Fault:
        """Return that Fault."""
        who = f" ({self.thread_name(int(np.argmax(lanes)))})" if lanes is not None and lanes.any() else ""
        where = str(instruction.location) if instruction is not None and instruction.location else ""
        return Fault(kind, message + who, where, instruction.text if instruction is not None else "")


def _shared_size(program: Program) -> int:
    """Bytes of static shared memory, up to where the dynamic part begins."""
    starts = [v.offset for v in program.variables.values() if v.space == "shared" and not v.size]
    return max([program.shared, *starts])
