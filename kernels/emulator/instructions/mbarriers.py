"""The instructions mbarrier.*: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".

try_wait parks its lanes until the phase is over, so a loop around it runs once. A GPU also holds the thread
back, but lets it try again after some time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..base.addresses import lanes_of, of_lanes
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..copies.bulk_copies import BulkCopies
from ..copies.clusters import RemoteAccesses
from ..machine.machine import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError
from ..ptx.operands import Address
from ..synchronization.async_groups import snapshot
from ..synchronization.mbarriers import Mbarriers

# Copies complete when no lane can run. A loop around test_wait can always run: its copies complete after
# this many failed tests.
PATIENCE = 64


@unit("mbarrier.init", order="fence", results=0)
def init(batch: Batch) -> Run:
    """mbarrier.init{.shared}.b64 [addr], count."""
    address, count = batch.address(0), batch.source(1, "u32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes, mbarriers = lanes_of(machine, mask), machine.state(Mbarriers)
        counts = of_lanes(count(machine), machine, lanes)
        block, offset = mbarriers.keys(address(machine), lanes)
        for i, lane in enumerate(lanes):
            mbarriers.make((int(block[i]), int(offset[i])), int(counts[i]), int(lane))

    return run


@unit("mbarrier.inval", order="fence", results=0)
def inval(batch: Batch) -> Run:
    """mbarrier.inval{.shared}.b64 [addr]."""
    address = batch.address(0)

    def run(machine: Machine, mask: Mask) -> None:
        lanes, mbarriers = lanes_of(machine, mask), machine.state(Mbarriers)
        for key, which in mbarriers.by_key(address(machine), lanes):
            mbarriers.at(key, lanes[which])
            del mbarriers.table[key]

    return run


@unit("mbarrier.arrive", "mbarrier.arrive.expect_tx", order="fence")
def arrive(batch: Batch) -> Run:
    """mbarrier.arrive{.sem.scope}{.space}.b64 {state or _,} [addr]{, count}, and .expect_tx with its bytes.

    Each thread arrives once, or `count` times; expect_tx announces bytes first.
    """
    opcode, operands = batch.first.opcode, batch.first.operands
    if "noComplete" in opcode:
        raise EmulatorError(f"this form of mbarrier.arrive is not emulated: {batch.first.text}")
    at = next(i for i, operand in enumerate(operands) if isinstance(operand, Address))
    address, write = batch.address(at), batch.target(0, "b64") if at else None
    amount = batch.source(at + 1, "u32") if batch.has(at + 1) else None
    announces, relaxed = "expect_tx" in opcode, "relaxed" in opcode

    def run(machine: Machine, mask: Mask) -> None:
        lanes, mbarriers, clocks = lanes_of(machine, mask), machine.state(Mbarriers), machine.clocks
        amounts = (
            np.ones(lanes.size, np.int64) if amount is None else of_lanes(amount(machine), machine, lanes)
        )
        agents = clocks.agents_of_lanes[lanes]
        states = np.zeros((1, machine.lanes), np.uint64)
        for key, which in mbarriers.by_key(address(machine), lanes):
            first = int(lanes[which[0]])
            mbarrier = mbarriers.at(key, lanes[which])
            states[0, lanes[which]] = mbarrier.phase
            machine.state(RemoteAccesses).note(key[0], agents[which])
            # Bytes are announced before anything arrives, since the last arrival ends the phase.
            clock = None if relaxed else snapshot(clocks, np.unique(agents[which])).max(axis=0)
            count = which.size if announces else int(amounts[which].sum())
            with machine.located(first):
                if announces:
                    mbarrier.expect(int(amounts[which].sum()))
                machine.events += mbarrier.arrive(count, clock)
        clocks.tick(np.unique(agents))
        if write is not None:
            write(machine, states, mask)

    return run


@unit("mbarrier.expect_tx", "mbarrier.complete_tx", order="fence", results=0)
def count_bytes(batch: Batch) -> Run:
    """mbarrier.expect_tx and complete_tx{.sem.scope}{.space}.b64 [addr], bytes: without an arrival."""
    address, amount = batch.address(0), batch.source(1, "u32")
    announces = batch.first.opcode[1] == "expect_tx"

    def run(machine: Machine, mask: Mask) -> None:
        lanes, mbarriers = lanes_of(machine, mask), machine.state(Mbarriers)
        amounts = of_lanes(amount(machine), machine, lanes)
        nothing = np.zeros(machine.clocks.agents, np.int32)
        for key, which in mbarriers.by_key(address(machine), lanes):
            first, total = int(lanes[which[0]]), int(amounts[which].sum())
            mbarrier = mbarriers.at(key, lanes[which])
            with machine.located(first):
                over = mbarrier.expect(total) if announces else mbarrier.complete(total, nothing)
            machine.events += over

    return run


def _look(batch: Batch, waits: bool) -> Callable[[Machine, Array], Lanes]:
    """Return a function that tells which of some lanes find their phase over.

    Those learn what the arrivals released. The others wait, or look again.
    """
    by_state = "parity" not in batch.first.opcode
    address, phase = batch.address(1), batch.source(2, "b64" if by_state else "u32")

    def look(machine: Machine, lanes: Array) -> Lanes:
        mbarriers, clocks = machine.state(Mbarriers), machine.clocks
        wanted = of_lanes(phase(machine), machine, lanes)
        passed = np.zeros(lanes.size, np.bool_)
        agents = clocks.agents_of_lanes[lanes]
        for key, which in mbarriers.by_key(address(machine), lanes):
            mbarrier = mbarriers.at(key, lanes[which])
            for one in np.unique(wanted[which]):
                those = which[wanted[which] == one]
                waiting = mbarriers.awaited.setdefault(key, set())
                if mbarrier.phase > int(one) if by_state else mbarrier.over(int(one) & 1):
                    passed[those] = True
                    clocks.join(np.unique(agents[those]), mbarrier.completed)
                    waiting.difference_update(lanes[those].tolist())
                elif waits:
                    waiting.update(lanes[those].tolist())
                    mbarriers.waits[key] = machine.instruction
                else:
                    mbarriers.looks[key] = mbarriers.looks.get(key, 0) + 1
                    if mbarriers.looks[key] % PATIENCE == 0:
                        machine.state(BulkCopies).load([key])
        return passed

    return look


@unit("mbarrier.try_wait", order="sync")
def try_wait(batch: Batch) -> Run:
    """mbarrier.try_wait{.parity}{.sem.scope}{.space}.b64 p, [addr], state or parity{, time}."""
    write, look = batch.target(0, "pred"), _look(batch, waits=True)

    def run(machine: Machine, mask: Mask) -> Lanes:
        lanes = lanes_of(machine, mask)
        back = np.ones(machine.lanes, np.bool_)
        if lanes.size:
            back[lanes] = look(machine, lanes)
        # Lanes that the guard leaves out pass without a result.
        passed = back if mask is None else back & mask
        if passed.any():
            write(machine, np.ones((1, 1), np.bool_), passed)
        return back

    return run


@unit("mbarrier.test_wait", order="fence")
def test_wait(batch: Batch) -> Run:
    """mbarrier.test_wait{.parity}{.sem.scope}{.space}.b64 p, [addr], state or parity: tests only."""
    write, look = batch.target(0, "pred"), _look(batch, waits=False)

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        result = np.zeros((1, machine.lanes), np.bool_)
        result[0, lanes] = look(machine, lanes)
        write(machine, result, mask)

    return run
