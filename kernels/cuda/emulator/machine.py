"""The machine: some blocks of a launch, all their threads side by side in NumPy, and the loop that runs them.

A lane is a thread. Lanes of a block follow one another, its last warp filled up with lanes that never run;
warp w of the machine has lanes 32 w to 32 w + 31. Lanes that stand at the same instruction run together,
whatever warp or block they belong to: a *front*. The front at the lowest instruction goes first, so that
threads that took different branches meet again. What order real warps would run in is not decided by this:
what may go wrong in another order is found by `clocks`, not by luck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from .batch import DTYPES
from .clocks import Clocks
from .counts import Counts
from .fault import Fault
from .memory import GlobalMemory
from .program import Instruction, Program
from .schedule import Block, Code
from .units import Array, Mask

WARP = 32
POISON = 0xFF  # what memory holds that nobody wrote: as a float32 or a float64, NaN
# A front that goes round this often while others wait lets one of them go: it may wait for what they write.
# While that goes on, it does so after half as many rounds each time.
PATIENCE, IMPATIENCE = 2048, 16

State = TypeVar("State")


class Machine:
    """Blocks `first` to `first + blocks` of a launch.

    What units use: `files` and `views` of registers (through a Batch), `shared` (blocks, bytes), `memory`
    (global), `clocks` (happens-before), `counts` (None unless profiling), `state(Class)` for what a unit
    keeps, `events` (raised by whatever may let waiting lanes go on), `late` (functions that complete one
    pending operation when no lane can run), and `fault`.
    """

    def __init__(
        self,
        code: Code,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        first: int,
        blocks: int,
        parameters: dict[str, bytes],
        memory: GlobalMemory,
        shared: int = 0,
        cluster: int = 1,
        counts: Counts | None = None,
    ) -> None:
        self.code, self.program = code, code.program
        self.grid, self.block, self.first, self.blocks, self.cluster = grid, block, first, blocks, cluster
        self.parameters, self.memory, self.counts = parameters, memory, counts
        self.threads = block[0] * block[1] * block[2]  # of a block
        self.warps_per_block = -(-self.threads // WARP)
        self.lanes_per_block = self.warps_per_block * WARP
        self.warps = blocks * self.warps_per_block
        self.lanes = blocks * self.lanes_per_block
        lane = np.arange(self.lanes)
        self.block_of_lane = lane // self.lanes_per_block
        self.warp_of_lane = lane // WARP
        self.thread_of_lane = lane % self.lanes_per_block  # within its block
        self.alive = self.thread_of_lane < self.threads
        self.full = bool(self.alive.all())
        self.dynamic = shared
        self.shared_size = _shared_size(self.program) + shared
        self.shared_pitch = (
            -(-max(self.shared_size, 16) // 1024) * 1024
        )  # descriptors count on this alignment
        self.shared = np.full((blocks, self.shared_pitch), POISON, np.uint8)
        self.local = np.full((self.lanes, -(-self.program.local // 16) * 16), POISON, np.uint8)
        self.files: dict[str, Array] = {
            file: np.zeros((rows, self.lanes), np.bool_ if file == "pred" else f"u{int(file[1:]) // 8}")
            for file, rows in code.registers.items()
        }
        self.views: dict[tuple[str, str], Array] = {}
        for file, registers in self.files.items():
            for dtype in {registers.dtype, *DTYPES.values()}:
                if dtype.itemsize == registers.dtype.itemsize and (dtype.kind == "b") == (file == "pred"):
                    self.views[file, dtype.str] = registers.view(dtype)
        self.clocks = Clocks(self)
        self.events = 0
        self.late: list[Callable[[], bool]] = []
        self._states: dict[type[Any], Any] = {}
        self._specials: dict[str, Any] = {}
        self.instruction: Instruction | None = None  # the one that runs, for faults

    def state(self, kind: Callable[[Machine], State]) -> State:
        """Return this machine's one object of class `kind`, made with the machine when first asked for."""
        if kind not in self._states:
            self._states[kind] = kind(self)  # type: ignore[index]
        found: State = self._states[kind]  # type: ignore[index]
        return found

    def run(self) -> None:
        """Run all lanes to their end. Raises Fault for what a GPU would not forgive."""
        fronts: dict[int, NDArray[np.bool_]] = {0: self.alive.copy()}
        parked: dict[int, NDArray[np.bool_]] = {}
        rounds, patience = 0, PATIENCE
        while fronts or parked:
            if not fronts:
                self._wake(fronts, parked)
                continue
            if len(fronts) == 1:
                rounds, patience = 0, PATIENCE
            rounds += 1
            place = min(fronts)
            if rounds == patience:
                rounds, patience = 0, max(patience // 2, IMPATIENCE)
                place = max(fronts)
            lanes = fronts.pop(place)
            block = self.code.blocks.get(place)
            if block is None:  # past the last instruction
                self.alive &= ~lanes
                continue
            self._run_block(block, lanes, fronts, parked)
        for state in list(self._states.values()):
            if finish := getattr(state, "finish", None):
                finish()

    def _run_block(
        self,
        block: Block,
        lanes: NDArray[np.bool_],
        fronts: dict[int, NDArray[np.bool_]],
        parked: dict[int, NDArray[np.bool_]],
    ) -> None:
        mask: Mask = None if self.full and lanes.all() else lanes
        for step in block.steps:
            active = mask
            if step.guard is not None:
                guard = step.guard(self)
                active = guard if mask is None else guard & mask
                if not active.any() and not step.sync:
                    continue
                if active.all():
                    active = None
            self.instruction = step.instructions[0]
            if self.counts is not None:
                self.counts.step(self, step.instructions, active)
            passed = step.run(self, active)
            if step.sync and passed is not None and not (kept := passed | ~lanes).all():
                stay = ~kept
                parked[block.start] = parked.get(block.start, False) | stay
                lanes = lanes & passed
                if not lanes.any():
                    return
        if block.control is None:
            _join(fronts, block.next, lanes)
            return
        taken = lanes if block.guard is None else lanes & block.guard(self)
        if self.counts is not None:
            self.counts.control(self, block.control, lanes)
        if block.control.opcode[0] == "bra":
            if taken.any():
                _join(fronts, block.target, taken)
        elif block.control.opcode[0] == "trap":
            if taken.any():
                self.instruction = block.control
                self.fault("trap", "the kernel stops itself", lanes=taken)
        else:
            self.alive &= ~taken
            self.full = False
            self.events += 1
        if block.guard is not None and (rest := lanes & ~taken).any():
            _join(fronts, block.next, rest)

    def _wake(self, fronts: dict[int, NDArray[np.bool_]], parked: dict[int, NDArray[np.bool_]]) -> None:
        """Let waiting lanes try again; where none of them gets on, complete something that is pending."""
        before = self.events
        for place in sorted(parked):
            lanes = parked.pop(place)
            waiting: dict[int, NDArray[np.bool_]] = {}
            self._run_block(self.code.blocks[place], lanes, fronts, waiting)
            parked.update(waiting)
        if fronts or self.events != before:
            return
        for complete in self.late:
            if complete():
                return
        self._deadlock(parked)

    def _deadlock(self, parked: dict[int, NDArray[np.bool_]]) -> NoReturn:
        """Say who waits where, for the first block in which anybody does."""
        block = min(int(self.block_of_lane[lanes].min()) for lanes in parked.values())
        mine = self.block_of_lane == block
        waits = []
        for place in sorted(parked):
            count = int((parked[place] & mine).sum())
            if count:
                instruction = self.program.instructions[place]
                self.instruction = instruction
                waits.append(
                    f"{count} wait at {instruction.location or 'an unknown line'} [{instruction.text}]"
                )
        ended = self.threads - int((self.alive & mine).sum())
        if ended:
            waits.append(f"{ended} have ended")
        what = (
            f"of {self.threads} threads of {self.block_name(block)}, {', '.join(waits)}: none can ever go on"
        )
        is_barrier = self.instruction is not None and self.instruction.opcode[0] in ("bar", "barrier")
        self.fault("barrier not reached by all threads" if is_barrier else "deadlock", what)

    def special(self, name: str) -> Any:
        """Return the special register `name`: one number for each lane, or one for all."""
        if name not in self._specials:
            self._specials[name] = self._special(name)
        return self._specials[name]

    def _special(self, name: str) -> Any:
        word, _, axis = name.partition(".")
        thread, index = self.thread_of_lane, self.first + self.block_of_lane
        if axis in ("x", "y", "z"):
            i = "xyz".index(axis)
            below = int(np.prod(self.block[:i]))
            across = int(np.prod(self.grid[:i]))
            cluster = self.cluster if axis == "x" else 1
            found = {
                "%tid": thread // below % self.block[i],
                "%ntid": self.block[i],
                "%ctaid": index // across % self.grid[i],
                "%nctaid": self.grid[i],
                "%cluster_ctaid": index // across % self.grid[i] % cluster,
                "%cluster_nctaid": cluster,
                "%clusterid": index // across % self.grid[i] // cluster,
                "%nclusterid": self.grid[i] // cluster,
            }
            if word in found:
                return found[word]
        lane = thread % WARP
        bits = np.uint64(1) << lane.astype(np.uint64)
        simple = {
            "%laneid": lane,
            "%warpid": thread // WARP,
            "%nwarpid": self.warps_per_block,
            "%cluster_ctarank": index % self.cluster,
            "%cluster_nctarank": self.cluster,
            "%is_explicit_cluster": self.cluster > 1,
            "%smid": index,
            "%nsmid": self.grid[0] * self.grid[1] * self.grid[2],
            "%gridid": 0,
            "%dynamic_smem_size": self.dynamic,
            "%total_smem_size": self.shared_size,
            "WARP_SZ": WARP,
            "%lanemask_eq": bits,
            "%lanemask_lt": bits - np.uint64(1),
            "%lanemask_le": 2 * bits - np.uint64(1),
            "%lanemask_gt": ~(2 * bits - np.uint64(1)),
            "%lanemask_ge": ~(bits - np.uint64(1)),
        }
        if name not in simple:
            self.fault("unknown", f"the emulator has no special register {name}")
        return simple[name]

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
        instruction: Instruction | None = None,
        lanes: NDArray[np.bool_] | None = None,
    ) -> NoReturn:
        """Raise the Fault `kind` at `instruction` (else the one that runs), naming the first of `lanes`."""
        at = instruction or self.instruction
        who = f" ({self.thread_name(int(np.argmax(lanes)))})" if lanes is not None and lanes.any() else ""
        where = str(at.location) if at is not None and at.location else ""
        raise Fault(kind, message + who, where, at.text if at is not None else "")


def _shared_size(program: Program) -> int:
    """Bytes of static shared memory, up to where the dynamic part begins."""
    starts = [v.offset for v in program.variables.values() if v.space == "shared" and not v.size]
    return max([program.shared, *starts])


def _join(fronts: dict[int, NDArray[np.bool_]], place: int, lanes: NDArray[np.bool_]) -> None:
    there = fronts.get(place)
    fronts[place] = lanes if there is None else there | lanes
