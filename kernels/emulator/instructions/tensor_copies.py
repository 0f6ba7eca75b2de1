"""cp.async.bulk.tensor: tensor copies between a matrix and shared memory, by the copy engine (TMA).

One thread names a tensor map and the corner of a box. The copy engine computes all addresses and swizzles.
Outside of the matrix, a load fills in zeros and a store writes nothing (PTX ISA, "cp.async.bulk.tensor" and
"Tensors"). A tensor map has checked itself when it was made.

The emulator carries copies out as late as it can. A load writes its box when no thread can run and one waits
for the load's mbarrier; loads follow one another until the phase is over. A store reads its box when its
thread waits for the read (wait_group.read), and writes it when the thread waits for the write, or at the end.
A multicast load is a separate copy for each block of the cluster, counted at that block's mbarrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..accesses import race_faults as races
from ..accesses.async_accesses import TensorMapFences, read_by_engine
from ..accesses.descriptors import CHUNK, swizzle
from ..base.addresses import in_shared_window, lanes_of, of_lanes, shared_blocks
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit, unit_of_lanes
from ..machine.machine_state import Machine
from ..machine.races_in_shared_memory import Clocks
from ..ptx.dtypes import Array, Mask
from ..ptx.fault import EmulatorError, Fault
from ..ptx.program import Address, PtxInstruction, Vector
from ..synchronization.async_groups import AsyncGroups, begin
from ..synchronization.clusters import RemoteAccesses
from ..synchronization.mbarriers import Key, Mbarriers

ALIGNMENT = 128  # bytes, of a box in shared memory
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(eq=False)
class Transfer:
    """A load or a store under way, between a box of a matrix and shared memory."""

    instruction: PtxInstruction | None
    lane: int  # the thread that began it
    tensor: Any  # a TensorMap (kernels/cuda/runtime/matrix.py)
    corner: tuple[int, int]  # (x, y) of the box in the matrix
    block: int  # whose shared memory it uses,
    chunks: Array  # (box rows, chunks): at these offsets, in units of 16 bytes
    mbarrier: Key  # where a load counts its bytes
    clock: Array  # what a thread learns that waits for it
    box: Array | None = None  # the data of a store, once they are read

    def granules(self, clocks: Clocks) -> Array:
        """Return the granules of shared memory that it touches, (1, n)."""
        start, size = int(self.chunks.min()) * CHUNK, self.chunks.size * CHUNK
        return clocks.granules(np.array([self.block]), np.array([start]), size)


def check(tensor: Any) -> None:
    """Raise EmulatorError for a tensor map that is not emulated."""
    inner = tensor.box_columns * _BYTES[tensor.dtype]
    if tensor.swizzle and inner < tensor.swizzle:
        raise EmulatorError(
            f"a row of the box is {inner} bytes: a {tensor.swizzle}-byte swizzle of less is not emulated"
        )


def box_bytes(tensor: Any) -> int:
    """Return the bytes that one load writes and counts at its mbarrier: the whole box, zeros included."""
    return tensor.box_rows * tensor.box_columns * _BYTES[tensor.dtype]


def box_addresses(tensor: Any, address: int, size: int) -> Array:
    """Return the shared-memory addresses of the 16-byte chunks (box rows, chunks) of a box at `address`.

    The swizzle's pattern depends on the address alone, not on where the box begins. Raises Fault if the box
    is not aligned to 128 bytes, or leaves the `size` bytes of the block's shared memory.
    """
    if address % ALIGNMENT:
        raise Fault(
            "misaligned", f"the box at {address:#x} of shared memory is not aligned to {ALIGNMENT} bytes"
        )
    if address + box_bytes(tensor) > size:
        raise Fault(
            "out of bounds",
            f"the box at {address:#x} takes {box_bytes(tensor)} bytes, and shared memory has {size}",
        )
    chunks = np.arange(box_bytes(tensor) // CHUNK).reshape(tensor.box_rows, -1)
    return swizzle(address + CHUNK * chunks, tensor.swizzle)


def load_box(tensor: Any, x: int, y: int) -> Array:
    """Return the box at column x and row y, (box rows, chunks) of 16 bytes; 0 outside of the matrix."""
    bits = _bits(tensor)
    box = np.zeros((tensor.box_rows, tensor.box_columns), bits.dtype)
    inside, outer = _overlap(tensor, x, y)
    box[inside] = bits[outer]
    return box.view("V16")


def store_box(tensor: Any, x: int, y: int, box: Array) -> None:
    """Write a box, (box rows, chunks) of 16 bytes, to the matrix at column x and row y."""
    bits = _bits(tensor)
    if not bits.flags.writeable:
        raise Fault("read-only memory", "a tensor copy writes to a matrix that is read-only")
    inside, outer = _overlap(tensor, x, y)
    bits[outer] = np.ascontiguousarray(box).view(bits.dtype)[inside]


def _bits(tensor: Any) -> Array:
    """Return a view of the matrix (rows, columns) as unsigned integers of its elements' size."""
    memory = np.asarray(tensor.array)
    if not memory.flags.c_contiguous:
        raise EmulatorError("a tensor map's array is not contiguous: pass the matrix's plain memory")
    flat = memory.reshape(-1).view(f"u{_BYTES[tensor.dtype]}")
    if flat.size < (tensor.rows - 1) * tensor.pitch + tensor.columns:
        raise Fault(
            "out of bounds",
            f"the tensor map has {tensor.rows} rows at a pitch of {tensor.pitch}, "
            f"and the array {flat.size} elements",
        )
    if flat.ctypes.data % CHUNK:
        raise Fault(
            "tensor map",
            f"the matrix does not start at a multiple of {CHUNK} bytes: copy it to one that does",
        )
    step = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat, (tensor.rows, tensor.columns), (tensor.pitch * step, step), writeable=flat.flags.writeable
    )


def _overlap(tensor: Any, x: int, y: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Return where the box at (x, y) overlaps the matrix: as slices of the box, and of the matrix."""
    inside, outer = [], []
    for start, box, extent in ((y, tensor.box_rows, tensor.rows), (x, tensor.box_columns, tensor.columns)):
        first, end = (min(max(edge, 0), extent) for edge in (start, start + box))
        inside.append(slice(first - start, end - start))
        outer.append(slice(first, end))
    return (inside[0], inside[1]), (outer[0], outer[1])


class BulkCopies:
    """The bulk copies under way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loads: list[Transfer] = []
        self.unread: AsyncGroups[Transfer] = AsyncGroups(machine.lanes)
        self.unwritten: AsyncGroups[Transfer] = AsyncGroups(machine.lanes)
        self.chunks = machine.shared.view("V16")  # (blocks, chunks)
        machine.state(Mbarriers)  # whose function in `late`, which faults, has to come after this one
        machine.late.insert(0, self._load)

    def _load(self) -> bool:
        """Complete loads in order until phases that threads wait for are over; return whether any was."""
        mbarriers = self.machine.state(Mbarriers)
        awaited = [key for key, lanes in mbarriers.awaited.items() if lanes and key in mbarriers.table]
        phases = {key: mbarriers.table[key].phase for key in awaited}
        done = set()
        for load in self.loads:
            if load.mbarrier in phases and mbarriers.table[load.mbarrier].phase == phases[load.mbarrier]:
                self._arrive(load, mbarriers)
                done.add(load)
        self.loads = [load for load in self.loads if load not in done]
        return bool(done)

    def _arrive(self, load: Transfer, mbarriers: Mbarriers) -> None:
        machine = self.machine
        machine.instruction = load.instruction
        with machine.located(load.lane):
            self.chunks[load.block, load.chunks] = load_box(load.tensor, *load.corner)
            machine.clocks.pending[load.granules(machine.clocks)] = False
            mbarrier = mbarriers.at(load.mbarrier, np.array([load.lane]))
            machine.events += mbarrier.complete(box_bytes(load.tensor), load.clock)
        if machine.counts is not None:
            machine.counts.copied_bytes += box_bytes(load.tensor)
            machine.counts.tensor_bytes += box_bytes(load.tensor)

    def begin_load(self, load: Transfer) -> None:
        """Check a load, note what it will write, and begin it."""
        machine, clocks, lane, key = self.machine, self.machine.clocks, load.lane, load.mbarrier
        if not machine.state(Mbarriers).at(key, np.array([lane])).shown:
            text = f"names the mbarrier at byte {key[1]}, which its maker did not show to the copy engine"
            machine.fault_at("missing fence", f"{text}: fence.mbarrier_init, or fence.proxy.async", lane)
        granules = load.granules(clocks)
        agents, (load.clock,) = begin(clocks, clocks.agents_of_lanes[[lane]])
        if clocks.pending[granules].any():
            machine.fault_at("overwrites a pending copy", "copies to where another copy is under way", lane)
        found = clocks.write(granules, agents)
        races.of_engine(machine, found, granules, agents, "the copy engine write", lane)
        machine.state(RemoteAccesses).note(load.block, agents)
        clocks.tick(agents)
        clocks.pending[granules] = True
        clocks.any_pending = True
        self.loads.append(load)

    def begin_store(self, store: Transfer) -> None:
        """Check a store, note what it will read, and begin it."""
        machine, clocks, lane = self.machine, self.machine.clocks, store.lane
        granules = store.granules(clocks)
        agents, known = begin(clocks, clocks.agents_of_lanes[[lane]])
        read_by_engine(machine, granules, agents, known, "the copy engine read", [lane])
        (store.clock,) = known
        self.unread.begin(store, np.array([lane]))
        self.unwritten.begin(store, np.array([lane]))

    def read(self, lanes: Array, allowed: int) -> None:
        """wait_group.read: let stores of these lanes read shared memory, except the last groups."""
        clocks = self.machine.clocks
        for store, _ in self.unread.wait(lanes, allowed):
            store.box = self.chunks[store.block, store.chunks]
            clocks.join(clocks.agents_of_lanes[[store.lane]], store.clock)

    def write(self, lanes: Array, allowed: int) -> None:
        """wait_group: let stores of these lanes read, and write global memory."""
        self.read(lanes, allowed)
        for store, _ in self.unwritten.wait(lanes, allowed):
            self._write(store)

    def _write(self, store: Transfer) -> None:
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


@unit("cp.async.bulk.tensor", order="fence", results=0, counted="async copy")
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
        counters, bulk, nothing = (block, block), machine.state(BulkCopies), np.zeros(0, np.int32)
        if mbarrier is not None:
            counters = machine.state(Mbarriers).keys(of_lanes(mbarrier(machine), machine, lanes), lanes)
        for i, lane in enumerate(lanes.tolist()):
            found = machine.memory.tensor_maps.get(int(maps[i]))
            if found is None:
                machine.fault_at("wrong memory", "passes an address at which there is no tensor map", lane)
            if not machine.state(TensorMapFences).acquired(int(maps[i]), lane):
                text = "uses a tensor map that its block did not acquire before: fence.proxy.tensormap"
                machine.fault_at("missing fence", text, lane)
            with machine.located(lane):
                check(found)
                chunks = box_addresses(found, int(offset[i]), machine.shared_size) // CHUNK
            to = int(block[i])
            targets = [to] if masks is None else _targets(machine, to, int(masks[i]), lane)
            for to in targets:
                key = (int(counters[0][i]) if masks is None else to, int(counters[1][i]))
                corner = (int(xs[i]), int(ys[i]))
                transfer = Transfer(machine.instruction, lane, found, corner, to, chunks, key, nothing)
                (bulk.begin_load if loads else bulk.begin_store)(transfer)

    return run


def _targets(machine: Machine, block: int, ranks: int, lane: int) -> list[int]:
    """Return the blocks that a multicast load writes to: those of the cluster whose bits are set."""
    if not 0 < ranks < 1 << machine.cluster:
        text = f"copies to the blocks of mask {ranks:#b}, in a cluster of {machine.cluster}"
        machine.fault_at("out of bounds", text, lane)
    first = block // machine.cluster * machine.cluster
    return [first + rank for rank in range(machine.cluster) if ranks >> rank & 1]


@unit_of_lanes("cp.async.bulk.commit_group", order="fence", counted="wait")
def commit_group(machine: Machine, lanes: Array) -> None:
    """cp.async.bulk.commit_group: close the group of stores that each thread has begun since the last."""
    bulk = machine.state(BulkCopies)
    bulk.unread.commit(lanes)
    bulk.unwritten.commit(lanes)


@unit_of_lanes("cp.async.bulk.wait_group", order="fence", operands=("constant",), counted="wait")
def wait_group(machine: Machine, lanes: Array, allowed: int) -> None:
    """cp.async.bulk.wait_group n: wait until at most the last n groups are under way."""
    machine.state(BulkCopies).write(lanes, allowed)


@unit_of_lanes("cp.async.bulk.wait_group.read", order="fence", operands=("constant",), counted="wait")
def wait_group_read(machine: Machine, lanes: Array, allowed: int) -> None:
    """cp.async.bulk.wait_group.read n: wait until at most the last n groups are unread."""
    machine.state(BulkCopies).read(lanes, allowed)
