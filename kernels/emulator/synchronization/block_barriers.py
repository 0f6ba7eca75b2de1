"""Barriers of a block, of a warp and of the whole grid, fences, and instructions that only take time.

PTX ISA manual, "Parallel Synchronization and Communication Instructions: bar, barrier". A barrier for all
threads faults if a thread of a warp at it has ended, where a real GPU may hang or go on.

For the barrier of the grid, `cuda.cg.this_grid().sync()`, Numba calls two functions of CUDA's device runtime,
which a linker would add (CUDA C++ Programming Guide, "Grid Synchronization"). All blocks must be on the GPU
at once; `execution.run` checks that.
"""

from __future__ import annotations

import numpy as np

from ..base.addresses import active_lanes, awaited, lanes_of, of_every_lane, word
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.program import PtxInstruction, Symbol

MISSED = "barrier not reached by all threads"  # the fault of lanes that wait for ever


def names(what: str) -> tuple[str, ...]:
    """Return all names of a block's barrier."""
    return tuple(f"{name}.{what}" for name in ("bar", "barrier", "barrier.cta", "bar.cta"))


class Barriers:
    """The named barriers of each block: the lanes that wait, and the lanes that may go on."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.waiting: dict[int, Lanes] = {}  # lanes that have arrived and wait, by the barrier's name
        self.passed_by: dict[int, Lanes] = {}  # lanes that have arrived and gone on (bar.arrive)
        self.released = np.zeros(machine.lanes, np.bool_)
        self.votes = np.zeros(machine.lanes, np.bool_)  # of lanes that have arrived: the predicate of bar.red
        self.agreed = np.zeros(machine.lanes, np.int64)  # of released lanes: how many threads voted true
        self.came_at = np.full(machine.blocks, -1, np.int64)  # by block: where the first thread arrived
        self.mixed: dict[int, tuple[PtxInstruction, PtxInstruction]] = {}  # by block: two barriers at once

    def arrive(self, name: int, lanes: Lanes, expected: int, wait: bool) -> None:
        """Let lanes arrive at a barrier. In blocks where it has `expected` threads, release them."""
        machine = self.machine
        waiting = self.waiting.setdefault(name, np.zeros(machine.lanes, np.bool_))
        gone = self.passed_by.setdefault(name, np.zeros(machine.lanes, np.bool_))
        into = waiting if wait else gone
        if not (lanes & ~into).any():
            return
        into |= lanes
        machine.events += 1
        here: Lanes = np.asarray(lanes.reshape(machine.blocks, -1).any(axis=1))
        count = (waiting.astype(np.int64) + gone).reshape(machine.blocks, -1).sum(axis=1)
        full = here & (count == expected)
        if (over := here & (count > expected)).any():
            block = int(np.argmax(over))
            text = f"{count[block]} threads come to barrier {name}, which is for {expected}"
            machine.fault("barrier", text, lanes=lanes & (machine.block_of_lane == block))
        if name == 0 and expected == machine.threads:
            self._note_mixed(here, full)
        if not full.any():
            return
        free = np.repeat(full, machine.lanes_per_block)
        warps = ((waiting | gone) & free).reshape(machine.blocks, -1, 32).any(axis=2)
        if warps[full].all():
            machine.clocks.meet_all(np.flatnonzero(full))
        else:
            for block in np.flatnonzero(full).tolist():
                machine.clocks.meet(block, np.flatnonzero(warps[block]))
        self.count_votes((waiting | gone) & free, free)
        self.released |= waiting & free
        waiting &= ~free
        gone &= ~free

    def count_votes(self, voters: Lanes, those: Lanes) -> None:
        """Tell `those` lanes how many threads of their block voted true."""
        count = (voters & self.votes).reshape(self.machine.blocks, -1).sum(axis=1)
        self.agreed[those] = np.repeat(count, self.machine.lanes_per_block)[those]

    def first_mixed(self, block: int) -> PtxInstruction | None:
        """Return a barrier of a block at which some of its threads stood while others stood at another."""
        two = self.mixed.get(block)
        return min(two, key=lambda barrier: barrier.number) if two else None

    def _note_mixed(self, here: Lanes, full: Lanes) -> None:
        """Note when threads of one block are at different barriers: later faults may stem from it."""
        instruction = self.machine.instruction
        if instruction is None:
            return
        other = here & (self.came_at >= 0) & (self.came_at != instruction.number)
        for block in np.flatnonzero(other).tolist():
            first = self.machine.program.instructions[int(self.came_at[block]) - 1]
            self.mixed.setdefault(block, (first, instruction))
        self.came_at[here & (self.came_at < 0)] = instruction.number
        self.came_at[full] = -1


@unit(*names("sync"), order="barrier", results=0, counted="barrier", missed=MISSED)
def barrier_sync(batch: Batch) -> Run:
    """bar.sync a{, b}: wait until all threads of the block, or b of them, have arrived at barrier a."""
    name, count = batch.source(0, "u32"), batch.source(1, "u32") if batch.has(1) else None

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = active_lanes(machine, mask)
        return _wait(machine, lanes, name(machine), None if count is None else count(machine))

    return run


@unit(*names("red"), order="barrier", counted="barrier", missed=MISSED)
def barrier_reduction(batch: Batch) -> Run:
    """bar.red.popc.u32 d, a{, b}, p and bar.red.and|or.pred q, a{, b}, p: a barrier with a vote."""
    kind = "u32" if "popc" in batch.first.opcode else "pred"
    name, votes, write = batch.source(1, "u32"), batch.source(-1, "pred"), batch.target(0, kind)
    count = batch.source(2, "u32") if batch.has(3) else None

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = active_lanes(machine, mask)
        barriers, expected = machine.state(Barriers), None if count is None else count(machine)
        np.copyto(barriers.votes, of_every_lane(machine, votes(machine)), where=lanes)
        passed = _wait(machine, lanes, name(machine), expected)
        agreed = barriers.agreed
        if kind == "u32":
            value: Array = agreed.astype(np.uint32)
        elif "and" in batch.first.opcode:
            value = agreed == (machine.threads if expected is None else of_every_lane(machine, expected))
        else:
            value = agreed > 0
        write(machine, value[None], mask if passed is None else passed)
        return passed

    return run


def _wait(machine: Machine, lanes: Lanes, names: Array, counts: Array | None) -> Lanes | None:
    """Let lanes arrive at a barrier and wait; return those that pass, None for all."""
    barriers = machine.state(Barriers)
    if counts is None and _all_here(machine, lanes, barriers):
        blocks = np.flatnonzero(lanes.reshape(machine.blocks, -1).any(axis=1))
        machine.clocks.meet_all(blocks)
        machine.events += 1
        barriers.count_votes(lanes, lanes)
        return None
    back: Lanes = barriers.released & lanes
    barriers.released &= ~back
    coming = lanes & ~back
    if coming.any() and (coming := _whole_warps(machine, coming)).any():
        _arrive(machine, coming, names, counts, wait=True)
        back |= barriers.released & lanes
        barriers.released &= ~back
    return back


@unit(*names("arrive"), order="barrier", results=0, counted="barrier", missed=MISSED)
def barrier_arrive(batch: Batch) -> Run:
    """bar.arrive a, b: arrive at barrier a, which is for b threads, and go on."""
    name, count = batch.source(0, "u32"), batch.source(1, "u32")

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = active_lanes(machine, mask)
        whole = _whole_warps(machine, lanes)
        if whole.any():
            _arrive(machine, whole, name(machine), count(machine), wait=False)
        return None if whole is lanes else whole

    return run


def _all_here(machine: Machine, lanes: Lanes, barriers: Barriers) -> bool:
    """Return whether all threads of each arriving block arrive now, which is the usual case."""
    earlier = (*barriers.waiting.values(), *barriers.passed_by.values(), barriers.released)
    if any(lanes.any() for lanes in earlier):
        return False
    per_block = (lanes == machine.shape.is_thread).reshape(machine.blocks, -1).all(axis=1)
    here = lanes.reshape(machine.blocks, -1).any(axis=1)
    return bool((per_block | ~here).all())


def _whole_warps(machine: Machine, lanes: Lanes) -> Lanes:
    """Return the lanes whose whole warp has arrived; Fault if other lanes of their warp have ended."""
    real = machine.shape.is_thread.reshape(-1, 32)
    here = lanes.reshape(-1, 32)
    parts = here.any(axis=1) & (here != real).any(axis=1)
    if not parts.any():
        return lanes
    ended = parts & (real & ~machine.alive.reshape(-1, 32)).any(axis=1)
    if ended.any():
        warp = int(np.argmax(ended))
        count, of = int(here[warp].sum()), int(real[warp].sum())
        machine.fault(
            "barrier not reached by all threads",
            f"{count} of the {of} threads of a warp come to a barrier, "
            "and others have ended: let all threads come to it, and return after it",
            lanes=lanes & (machine.warp_of_lane == warp),
        )
    return lanes & ~np.repeat(parts, 32)


def _arrive(machine: Machine, lanes: Lanes, names: Array, counts: Array | None, wait: bool) -> None:
    names = of_every_lane(machine, names)
    wanted = of_every_lane(machine, np.array(machine.threads) if counts is None else counts)
    for name, expected in np.unique(np.stack([names[lanes], wanted[lanes]], axis=1), axis=0).tolist():
        those = lanes & (names == name) & (wanted == expected)
        if counts is not None and expected % 32:
            text = f"a barrier for {expected} threads: it must be a multiple of 32"
            machine.fault("barrier", text, lanes=those)
        machine.state(Barriers).arrive(name, those, expected, wait)


@unit("bar.warp", "barrier.warp", order="barrier", results=0, counted="barrier", missed=MISSED)
def warp_barrier(batch: Batch) -> Run:
    """bar.warp.sync membermask: lanes of a warp wait for the lanes that the mask names."""
    members = batch.source(0, "u32")

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = active_lanes(machine, mask)
        bits = of_every_lane(machine, members(machine))
        missing = awaited(bits.reshape(-1, 32), lanes.reshape(-1, 32)) & word(machine.alive.reshape(-1, 32))
        if not missing.any():
            return None
        waits: Lanes = lanes & (missing != 0).reshape(-1)
        return ~waits

    return run


# These order or delay accesses, which the emulator runs in order anyway, or have no effect on results.
NO_EFFECT = "nanosleep prefetch prefetchu discard applypriority griddepcontrol pmevent brkpt"


@unit("membar", "fence", order="fence", results=0, counted="barrier")
@unit(*NO_EFFECT.split(), order="fence", results=0)
def no_effect(batch: Batch) -> Run:
    """Do nothing."""
    return lambda machine, mask: None


class GridBarrier:
    """The phase of the grid's barrier at which each lane of a machine waits."""

    def __init__(self, machine: Machine) -> None:
        self.phase = np.full(machine.lanes, -1, np.int64)  # -1: does not wait


@unit("call.cudaCGGetIntrinsicHandle", order="fence", results=0, counted="branch")
def handle(batch: Batch) -> Run:
    """Return a handle for the grid: any number but 0."""
    returned, _ = (operand.offset for operand in batch.first.operands if isinstance(operand, Symbol))

    def run(machine: Machine, mask: Mask) -> None:
        machine.local[lanes_of(machine, mask), returned : returned + 8] = 1

    return run


@unit("call.cudaCGSynchronize", order="barrier", results=0, counted="branch", missed=MISSED)
def synchronize(batch: Batch) -> Run:
    """Wait until all threads of the grid have arrived."""
    returned = next(operand.offset for operand in batch.first.operands if isinstance(operand, Symbol))

    def run(machine: Machine, mask: Mask) -> Lanes:
        launch, barrier = machine.launch, machine.state(GridBarrier)
        lanes = lanes_of(machine, mask)
        new = lanes[barrier.phase[lanes] < 0]
        barrier.phase[new] = launch.phase
        launch.arrived += new.size
        if launch.arrived == launch.blocks * launch.threads:
            launch.arrived, launch.phase = 0, launch.phase + 1
            launch.memory.order_all()
            machine.events += 1
        over = lanes[barrier.phase[lanes] < launch.phase]
        barrier.phase[over] = -1
        machine.local[over, returned : returned + 4] = 0  # no error
        if over.size:
            machine.clocks.meet_all(np.unique(machine.block_of_lane[over]))
        passed = np.zeros(machine.lanes, np.bool_)
        passed[over] = True
        return passed

    return run
