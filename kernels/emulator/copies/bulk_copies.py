"""cp.async.bulk.tensor: tensor copies between global memory and shared memory, by the copy engine.

The emulator carries them out as late as it can. A load writes its box when no thread can run and one waits
for the load's mbarrier; loads follow one another until the phase is over. A store reads its box when its
thread waits for the read (wait_group.read), and writes it when the thread waits for the write, or at the end.
A multicast load is a separate copy for each block of the cluster, counted at that block's mbarrier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..base.addresses import in_shared_window, lanes_of, of_lanes, shared_blocks
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..memory import races
from ..memory.async_accesses import (
    TensorMapFences,
    fault_for_missing_data,
    fault_for_missing_fence,
)
from ..ptx.dtypes import Array, Mask
from ..ptx.fault import EmulatorError
from ..ptx.operands import Address, Vector
from ..synchronization.async_groups import AsyncGroups, begin
from ..synchronization.mbarriers import Key, Mbarriers
from .clusters import RemoteAccesses
from .tensor_copies import BulkLoad, BulkStore, box_addresses, box_bytes, check, load_box, store_box


class BulkCopies:
    """The bulk copies under way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loads: list[BulkLoad] = []
        self.unread: AsyncGroups[BulkStore] = AsyncGroups(machine.lanes)
        self.unwritten: AsyncGroups[BulkStore] = AsyncGroups(machine.lanes)
        self.chunks = machine.shared.view("V16")  # (blocks, chunks)
        machine.state(Mbarriers)  # its function in `late`, which faults, has to come after this one
        machine.late.insert(0, self._load)

    def _load(self) -> bool:
        """Complete loads that a thread waits for; return whether there were any."""
        return self.load(key for key, lanes in self.machine.state(Mbarriers).awaited.items() if lanes)

    def load(self, keys: Iterable[Key]) -> bool:
        """Complete loads in order until the phases of these mbarriers are over; return whether any was."""
        mbarriers = self.machine.state(Mbarriers)
        phases = {key: mbarriers.table[key].phase for key in keys if key in mbarriers.table}
        done = set()
        for load in self.loads:
            if load.mbarrier in phases and mbarriers.table[load.mbarrier].phase == phases[load.mbarrier]:
                self._arrive(load, mbarriers)
                done.add(load)
        self.loads = [load for load in self.loads if load not in done]
        return bool(done)

    def _arrive(self, load: BulkLoad, mbarriers: Mbarriers) -> None:
        machine = self.machine
        machine.instruction = load.instruction
        with machine.located(load.lane):
            self.chunks[load.block, load.chunks] = load_box(load.tensor, *load.corner)
            machine.clocks.pending[load.granules] = False
            mbarrier = mbarriers.at(load.mbarrier, np.array([load.lane]))
            machine.events += mbarrier.complete(box_bytes(load.tensor), load.clock)
        if machine.counts is not None:
            machine.counts.copied_bytes += box_bytes(load.tensor)

    def read(self, lanes: Array, allowed: int) -> None:
        """wait_group.read: let stores of these lanes read shared memory, except the last groups."""
        clocks = self.machine.clocks
        for store, _ in self.unread.wait(lanes, allowed):
            store.box = self.chunks[self.machine.block_of_lane[store.lane], store.chunks]
            clocks.join(clocks.agents_of_lanes[[store.lane]], store.clock)

    def write(self, lanes: Array, allowed: int) -> None:
        """wait_group: let stores of these lanes read, and write global memory."""
        self.read(lanes, allowed)
        for store, _ in self.unwritten.wait(lanes, allowed):
            self._write(store)

    def _write(self, store: BulkStore) -> None:
        self.machine.instruction = store.instruction
        assert store.box is not None
        with self.machine.located(store.lane):
            store_box(store.tensor, *store.corner, store.box)

    def finish(self) -> None:
        """At the end of the kernel, write what was read; Fault if a copy still uses shared memory."""
        machine = self.machine
        if self.unread.pending:
            store = self.unread.pending[0][0]
            machine.instruction = store.instruction
            text = "ends before the copy engine has read what it stores: wait (cp.async.bulk.wait_group.read)"
            machine.fault_at("copy not waited for", text, store.lane)
        if self.loads:
            machine.instruction = self.loads[0].instruction
            text = "begins a tensor copy that is still under way when its block ends: wait for its mbarrier"
            machine.fault_at("copy not waited for", text, self.loads[0].lane)
        for store, _, _ in self.unwritten.pending:
            self._write(store)
        self.unwritten.pending.clear()


@unit("cp.async.bulk.tensor", order="fence", results=0)
def tensor_copy(batch: Batch) -> Run:
    """cp.async.bulk.tensor.2d: a load, to one block or several (.multicast::cluster), or a store."""
    opcode = batch.first.opcode
    loads = any(word.startswith("mbarrier::complete_tx") for word in opcode)
    hinted = any("cache_hint" in word for word in opcode)
    if opcode[4] != "2d" or "tile" not in opcode or not (loads or "bulk_group" in opcode) or hinted:
        raise EmulatorError(f"this form of cp.async.bulk.tensor is not emulated: {batch.first.text}")
    at = 1 if loads else 0
    tensor, shared = batch.address(at), batch.address(1 - at)
    corner = batch.first.operands[at]
    if not isinstance(corner, Address) or not corner.more or not isinstance(corner.more[0], Vector):
        raise EmulatorError(f"a tensor copy without coordinates: {batch.first.text}")
    x, y = (batch.reader([item], "s32") for item in corner.more[0].items)
    mbarrier = batch.address(2) if loads else None
    ranks = batch.source(3, "b16") if "multicast::cluster" in opcode else None

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        addresses = in_shared_window(machine, of_lanes(shared(machine), machine, lanes), lanes)
        block, offset = shared_blocks(machine, addresses, lanes)
        maps, xs, ys = (of_lanes(read(machine), machine, lanes) for read in (tensor, x, y))
        masks = None if ranks is None else of_lanes(ranks(machine), machine, lanes)
        if mbarrier is not None:
            counters = machine.state(Mbarriers).keys(mbarrier(machine), lanes)
        for i, lane in enumerate(lanes.tolist()):
            found = machine.memory.tensor_maps.get(int(maps[i]))
            if found is None:
                machine.fault_at("wrong memory", "passes an address at which there is no tensor map", lane)
            if not machine.state(TensorMapFences).acquired(int(maps[i]), lane):
                text = "uses a tensor map that its block did not acquire before: fence.proxy.tensormap"
                machine.fault_at("missing fence", text, lane)
            where = (int(xs[i]), int(ys[i]))
            with machine.located(lane):
                check(found)
                chunks = box_addresses(found, int(offset[i]), machine.shared_size) // 16
            if mbarrier is None:
                _store(machine, found, where, chunks, lane)
                continue
            for to in _targets(machine, int(block[i]), None if masks is None else int(masks[i]), lane):
                key = (to if masks is not None else int(counters[0][i]), int(counters[1][i]))
                _load(machine, found, where, to, chunks, key, lane)

    return run


def _targets(machine: Machine, block: int, ranks: int | None, lane: int) -> list[int]:
    """Return the blocks that a load writes to: one, or those of the cluster whose bits are set."""
    if ranks is None:
        return [block]
    if not 0 < ranks < 1 << machine.cluster:
        text = f"copies to the blocks of mask {ranks:#b}, in a cluster of {machine.cluster}"
        machine.fault_at("out of bounds", text, lane)
    first = block // machine.cluster * machine.cluster
    return [first + rank for rank in range(machine.cluster) if ranks >> rank & 1]


def _granules(machine: Machine, block: int, chunks: Array) -> Array:
    start, size = int(chunks.min()) * 16, chunks.size * 16
    return machine.clocks.granules(np.array([block]), np.array([start]), size)


def _load(
    machine: Machine, tensor: Any, corner: tuple[int, int], block: int, chunks: Array, key: Key, lane: int
) -> None:
    mbarrier = machine.state(Mbarriers).at(key, np.array([lane]))
    if not mbarrier.shown:
        text = f"names the mbarrier at byte {key[1]}, which its maker did not show to the copy engine"
        machine.fault_at("missing fence", f"{text}: fence.mbarrier_init, or fence.proxy.async", lane)
    clocks, granules = machine.clocks, _granules(machine, block, chunks)
    agents, known = begin(clocks, clocks.agents_of_lanes[[lane]])
    if clocks.pending[granules].any():
        machine.fault_at("overwrites a pending copy", "copies to where another copy is under way", lane)
    races.of_engine(machine, clocks.write(granules, agents), granules, agents, "the copy engine write", lane)
    machine.state(RemoteAccesses).note(block, agents)
    clocks.tick(agents)
    clocks.pending[granules] = True
    clocks.any_pending = True
    load = BulkLoad(machine.instruction, lane, tensor, corner, block, chunks, granules, key, known[0])
    machine.state(BulkCopies).loads.append(load)


def _store(machine: Machine, tensor: Any, corner: tuple[int, int], chunks: Array, lane: int) -> None:
    clocks = machine.clocks
    granules = _granules(machine, int(machine.block_of_lane[lane]), chunks)
    warp = clocks.agents_of_lanes[[lane]]
    fault_for_missing_data(machine, granules, "the copy engine read", lane)
    agents, known = begin(clocks, warp)
    races.of_engine(machine, clocks.read(granules, agents), granules, agents, "the copy engine read", lane)
    fault_for_missing_fence(machine, granules[0], int(warp[0]), known[0], "the copy engine read", lane)
    clocks.tick(agents)
    bulk = machine.state(BulkCopies)
    store = BulkStore(machine.instruction, lane, tensor, corner, chunks, known[0])
    bulk.unread.begin(store, np.array([lane]))
    bulk.unwritten.begin(store, np.array([lane]))


@unit("cp.async.bulk.commit_group", order="fence", results=0)
def commit_group(batch: Batch) -> Run:
    """cp.async.bulk.commit_group: close the group of stores that each thread has begun since the last."""

    def run(machine: Machine, mask: Mask) -> None:
        bulk, lanes = machine.state(BulkCopies), lanes_of(machine, mask)
        bulk.unread.commit(lanes)
        bulk.unwritten.commit(lanes)

    return run


@unit("cp.async.bulk.wait_group", order="fence", results=0)
def wait_group(batch: Batch) -> Run:
    """cp.async.bulk.wait_group{.read} n: wait until at most the last n groups are under way, or unread."""
    count, only_read = batch.constant(0), "read" in batch.first.opcode

    def run(machine: Machine, mask: Mask) -> None:
        bulk, lanes = machine.state(BulkCopies), lanes_of(machine, mask)
        (bulk.read if only_read else bulk.write)(lanes, count)

    return run
