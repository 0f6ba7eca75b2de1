"""Barriers of a block and of a warp, fences, and what only takes time.

PTX ISA manual, "Parallel Synchronization and Communication Instructions: bar, barrier". A barrier for all
threads faults where a thread has ended or stands elsewhere in its warp; real GPUs may hang there or go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .batch import Batch
from .units import Mask, Run, unit

if TYPE_CHECKING:
    from .machine import Machine


class Barriers:
    """The named barriers of each block: who has come, and who may go."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arrived: dict[tuple[int, int], NDArray[np.bool_]] = {}  # (block, name): lanes, those that wait
        self.passed_by: dict[tuple[int, int], NDArray[np.bool_]] = {}  # lanes that arrived and went on
        self.released = np.zeros(machine.lanes, np.bool_)

    def come(self, block: int, name: int, lanes: NDArray[np.bool_], expected: int, wait: bool) -> None:
        """Let lanes of a block arrive; where that makes `expected` threads, release those that wait."""
        machine, key = self.machine, (block, name)
        nobody = np.zeros(machine.lanes, np.bool_)
        waiting = self.arrived.setdefault(key, nobody.copy())
        gone = self.passed_by.setdefault(key, nobody.copy())
        before = int(waiting.sum() + gone.sum())
        if wait:
            waiting |= lanes
        else:
            gone |= lanes
        both = waiting | gone
        count = int(waiting.sum() + gone.sum())
        if count == before:
            return
        machine.events += 1
        if count > expected:
            machine.fault(
                "barrier", f"{count} threads come to barrier {name}, which is for {expected}", lanes=lanes
            )
        if count == expected:
            warps = np.unique(machine.thread_of_lane[both] // 32)
            machine.clocks.meet(block, warps)
            self.released |= waiting
            del self.arrived[key], self.passed_by[key]


@unit("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync", order="sync", results=0)
def barrier_sync(batch: Batch) -> Run:
    """bar.sync a{, b}: wait until all threads of the block, or b of them, have come to barrier a."""
    name, count = batch.source(0, "u32"), batch.source(1, "u32") if batch.has(1) else None
    simple = count is None

    def run(machine: Machine, mask: Mask) -> NDArray[np.bool_]:
        lanes = np.ones(machine.lanes, np.bool_) if mask is None else mask
        barriers = machine.state(Barriers)
        if simple and _all_here(machine, lanes, barriers):
            blocks = np.unique(machine.block_of_lane[lanes])
            machine.clocks.meet_all(blocks)
            machine.events += 1
            return lanes
        back = barriers.released & lanes
        barriers.released &= ~back
        coming = lanes & ~back
        if coming.any():
            _whole_warps(machine, coming)
            _arrive(
                machine, barriers, coming, name(machine), None if count is None else count(machine), wait=True
            )
            back |= barriers.released & lanes
            barriers.released &= ~back
        return back

    return run


@unit("bar.arrive", "barrier.arrive", "barrier.cta.arrive", "bar.cta.arrive", order="barrier", results=0)
def barrier_arrive(batch: Batch) -> Run:
    """bar.arrive a, b: come to barrier a, which is for b threads, and go on."""
    name, count = batch.source(0, "u32"), batch.source(1, "u32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes = np.ones(machine.lanes, np.bool_) if mask is None else mask
        _whole_warps(machine, lanes)
        _arrive(machine, machine.state(Barriers), lanes, name(machine), count(machine), wait=False)

    return run


def _all_here(machine: Machine, lanes: NDArray[np.bool_], barriers: Barriers) -> bool:
    """Whether every thread of every block that has come is here now, as is usual."""
    if barriers.arrived or barriers.released.any():
        return False
    real = machine.thread_of_lane < machine.threads
    per_block = (lanes == real).reshape(machine.blocks, -1).all(axis=1)
    here = lanes.reshape(machine.blocks, -1).any(axis=1)
    return bool((per_block | ~here).all())


def _whole_warps(machine: Machine, lanes: NDArray[np.bool_]) -> None:
    """Fault where a warp has come in part: its other threads have ended, or stand elsewhere."""
    real = (machine.thread_of_lane < machine.threads).reshape(-1, 32)
    here = lanes.reshape(-1, 32)
    parts = here.any(axis=1) & (here != real).any(axis=1)
    if parts.any():
        warp = int(np.argmax(parts))
        count, of = int(here[warp].sum()), int(real[warp].sum())
        machine.fault(
            "barrier not reached by all threads",
            f"{count} of the {of} threads of a warp come to a barrier, "
            "and the others have ended or went another way",
            lanes=lanes & (machine.warp_of_lane == warp),
        )


def _arrive(
    machine: Machine,
    barriers: Barriers,
    lanes: NDArray[np.bool_],
    names: NDArray[np.uint32],
    counts: NDArray[np.uint32] | None,
    wait: bool,
) -> None:
    names = np.broadcast_to(names, (1, machine.lanes))[0]
    wanted = None if counts is None else np.broadcast_to(counts, (1, machine.lanes))[0]
    for block in np.unique(machine.block_of_lane[lanes]):
        mine = lanes & (machine.block_of_lane == block)
        for name in np.unique(names[mine]):
            those = mine & (names == name)
            expected = machine.threads if wanted is None else int(wanted[those][0])
            if wanted is not None and expected % 32:
                machine.fault(
                    "barrier", f"a barrier for {expected} threads: it must be a multiple of 32", lanes=those
                )
            # Lanes that pad the last warp of a block are threads of no barrier.
            barriers.come(int(block), int(name), those, expected, wait)


@unit("bar.warp", "barrier.warp", order="barrier", results=0)
def warp_barrier(batch: Batch) -> Run:
    """bar.warp.sync membermask: lanes of a warp wait for each other; here they run together anyway."""
    members = batch.source(0, "u32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes = np.ones(machine.lanes, np.bool_) if mask is None else mask
        bits = np.broadcast_to(members(machine), (1, machine.lanes))[0]
        here = lanes.reshape(-1, 32)
        active = here @ (np.uint64(1) << np.arange(32, dtype=np.uint64))
        alive = machine.alive.reshape(-1, 32) @ (np.uint64(1) << np.arange(32, dtype=np.uint64))
        missing = np.where(lanes, bits & np.repeat(alive & ~active, 32), 0)
        if missing.any():
            machine.fault(
                "barrier not reached by all threads",
                "bar.warp.sync names threads of the warp that went another way",
                lanes=missing != 0,
            )

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
