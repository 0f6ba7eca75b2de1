"""Barriers of a block and of a warp, fences, and what only takes time.

PTX ISA manual, "Parallel Synchronization and Communication Instructions: bar, barrier". A barrier for all
threads faults where a thread has ended or stands elsewhere in its warp; real GPUs may hang there or go on.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arithmetic.warp_operations import awaited, word
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..ptx.dtypes import Array, Mask
from ..ptx.program import PtxInstruction

Lanes: TypeAlias = NDArray[np.bool_]


class Barriers:
    """The named barriers of each block: who has come, and who may go."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.waiting: dict[int, Lanes] = {}  # by name: lanes that have come and wait
        self.passed_by: dict[int, Lanes] = {}  # lanes that have come and gone on
        self.released = np.zeros(machine.lanes, np.bool_)
        self.votes = np.zeros(machine.lanes, np.bool_)  # of those who have come: the predicate of bar.red
        self.agreed = np.zeros(machine.lanes, np.int64)  # of those who are released: how many voted for it
        self.came_at = np.full(machine.blocks, -1, np.int64)  # the barrier of a block's first to come
        self.mixed: dict[int, tuple[PtxInstruction, PtxInstruction]] = {}  # by block: the first two that met

    def come(self, name: int, lanes: Lanes, expected: int, wait: bool) -> None:
        """Let lanes arrive; in blocks where that makes `expected` threads, release those that wait."""
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
            self._note_place(here, full)
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
        """Let `those` know how many threads of their block voted for it."""
        count = (voters & self.votes).reshape(self.machine.blocks, -1).sum(axis=1)
        self.agreed[those] = np.repeat(count, self.machine.lanes_per_block)[those]

    def first_mixed(self, block: int) -> PtxInstruction | None:
        """Return a barrier of a block that some of its threads met at while others stood at another."""
        two = self.mixed.get(block)
        return min(two, key=self.machine.clocks.number) if two else None

    def _note_place(self, here: Lanes, full: Lanes) -> None:
        """Note that threads of one block have come to different barriers, for the case that some miss one."""
        instruction = self.machine.instruction
        if instruction is None:
            return
        place = self.machine.clocks.number(instruction)
        other = here & (self.came_at >= 0) & (self.came_at != place)
        for block in np.flatnonzero(other).tolist():
            first = self.machine.program.instructions[int(self.came_at[block]) - 1]
            self.mixed.setdefault(block, (first, instruction))
        self.came_at[here & (self.came_at < 0)] = place
        self.came_at[full] = -1


@unit("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync", order="sync", results=0)
def barrier_sync(batch: Batch) -> Run:
    """bar.sync a{, b}: wait until all threads of the block, or b of them, have come to barrier a."""
    name, count = batch.source(0, "u32"), batch.source(1, "u32") if batch.has(1) else None

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = np.ones(machine.lanes, np.bool_) if mask is None else mask
        return _wait(machine, lanes, name(machine), None if count is None else count(machine))

    return run


@unit("bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red", order="sync")
def barrier_reduction(batch: Batch) -> Run:
    """bar.red.popc.u32 d, a{, b}, p and bar.red.and|or.pred q, a{, b}, p: a barrier with a vote."""
    kind = "u32" if "popc" in batch.first.opcode else "pred"
    name, votes, write = batch.source(1, "u32"), batch.source(-1, "pred"), batch.target(0, kind)
    count = batch.source(2, "u32") if batch.has(3) else None

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = np.ones(machine.lanes, np.bool_) if mask is None else mask
        barriers, expected = machine.state(Barriers), None if count is None else count(machine)
        np.copyto(barriers.votes, np.broadcast_to(votes(machine), (1, machine.lanes))[0], where=lanes)
        passed = _wait(machine, lanes, name(machine), expected)
        agreed = barriers.agreed
        if kind == "u32":
            value: Array = agreed.astype(np.uint32)
        elif "and" in batch.first.opcode:
            all_of_them = (
                machine.threads if expected is None else np.broadcast_to(expected, (1, machine.lanes))[0]
            )
            value = agreed == all_of_them
        else:
            value = agreed > 0
        write(machine, value[None], mask if passed is None else passed)
        return passed

    return run


def _wait(
    machine: Machine, lanes: Lanes, names: NDArray[np.uint32], counts: NDArray[np.uint32] | None
) -> Lanes | None:
    """Let lanes come to a barrier and wait; return those that pass, None for all."""
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
        _arrive(machine, barriers, coming, names, counts, wait=True)
        back |= barriers.released & lanes
        barriers.released &= ~back
    return back


@unit("bar.arrive", "barrier.arrive", "barrier.cta.arrive", "bar.cta.arrive", order="barrier", results=0)
def barrier_arrive(batch: Batch) -> Run:
    """bar.arrive a, b: come to barrier a, which is for b threads, and go on."""
    name, count = batch.source(0, "u32"), batch.source(1, "u32")

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = np.ones(machine.lanes, np.bool_) if mask is None else mask
        whole = _whole_warps(machine, lanes)
        if whole.any():
            _arrive(machine, machine.state(Barriers), whole, name(machine), count(machine), wait=False)
        return None if whole is lanes else whole

    return run


def _all_here(machine: Machine, lanes: Lanes, barriers: Barriers) -> bool:
    """Whether every thread of every block that has come is here now, as is usual."""
    if any(waiting.any() for waiting in barriers.waiting.values()) or barriers.released.any():
        return False
    if any(gone.any() for gone in barriers.passed_by.values()):
        return False
    real = machine.thread_of_lane < machine.threads
    per_block = (lanes == real).reshape(machine.blocks, -1).all(axis=1)
    here = lanes.reshape(machine.blocks, -1).any(axis=1)
    return bool((per_block | ~here).all())


def _whole_warps(machine: Machine, lanes: Lanes) -> Lanes:
    """Return the lanes whose warps have come as a whole; Fault where others of their warp have ended."""
    real = (machine.thread_of_lane < machine.threads).reshape(-1, 32)
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
    whole: Lanes = lanes & ~np.repeat(parts, 32)
    return whole


def _arrive(
    machine: Machine,
    barriers: Barriers,
    lanes: Lanes,
    names: NDArray[np.uint32],
    counts: NDArray[np.uint32] | None,
    wait: bool,
) -> None:
    names = np.broadcast_to(names, (1, machine.lanes))[0]
    wanted = (
        np.full(machine.lanes, machine.threads)
        if counts is None
        else np.broadcast_to(counts, (1, machine.lanes))[0]
    )
    for name, expected in np.unique(np.stack([names[lanes], wanted[lanes]], axis=1), axis=0).tolist():
        those = lanes & (names == name) & (wanted == expected)
        if counts is not None and expected % 32:
            machine.fault(
                "barrier", f"a barrier for {expected} threads: it must be a multiple of 32", lanes=those
            )
        barriers.come(name, those, expected, wait)


@unit("bar.warp", "barrier.warp", order="barrier", results=0)
def warp_barrier(batch: Batch) -> Run:
    """bar.warp.sync membermask: lanes of a warp wait for those that it names."""
    members = batch.source(0, "u32")

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes = np.ones(machine.lanes, np.bool_) if mask is None else mask
        bits = np.broadcast_to(members(machine), (1, machine.lanes))[0]
        missing = awaited(bits.reshape(-1, 32), lanes.reshape(-1, 32)) & word(machine.alive.reshape(-1, 32))
        if not missing.any():
            return None
        waits: Lanes = lanes & (missing != 0).reshape(-1)
        return ~waits

    return run


@unit(
    "membar",
    "fence",
    "nanosleep",
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    order="fence",
    results=0,
)
def nothing(batch: Batch) -> Run:
    """Orders or delays; the emulator runs memory accesses in order anyway."""
    return lambda machine, mask: None


@unit("griddepcontrol", "pmevent", "brkpt", order="fence", results=0)
def no_effect(batch: Batch) -> Run:
    """Has no effect on what a kernel computes."""
    return lambda machine, mask: None
