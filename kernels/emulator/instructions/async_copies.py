"""cp.async: copies of 4, 8 or 16 bytes from global to shared memory that a thread begins and waits for later.

The emulator checks a copy's addresses when it begins, and marks its destination as pending. It reads global
memory and carries the copy out when the thread waits for its group (PTX ISA, "Data Movement and Conversion
Instructions: Non-bulk copy").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..accesses import race_faults as races
from ..accesses.access import Access
from ..accesses.loads_and_stores import fetch
from ..base.addresses import CLUSTER_SHIFT, in_shared_window, lanes_of
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit, unit_of_lanes
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError
from ..ptx.program import Register
from ..synchronization.async_groups import AsyncGroups, begin


@dataclass
class Copies:
    """The copies of one step: n instructions by some lanes, (n, lanes) each."""

    batch: Batch
    lanes: Array  # (lanes,)
    size: int  # bytes of each
    to: Array  # offsets in the shared memory of all blocks
    source: Array  # global addresses
    taken: Array | None  # bytes to read; zeros fill up the rest. None: all
    granules: Array  # (n, lanes, granules of a copy)
    agents: Array  # (lanes,): the warp that waits
    clocks: Array  # (lanes, agents of a block): what that warp knows after the wait


class AsyncCopies:
    """The copies under way, by lane."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.groups: AsyncGroups[Copies] = AsyncGroups(machine.lanes)
        self._claims = np.zeros(machine.clocks.written.size, np.int32)

    def begin(self, to: Access, sources: Array, taken: Array | None) -> None:
        """Check copies `to` shared memory, note their accesses, and begin them."""
        machine, clocks, lanes = to.machine, to.machine.clocks, to.lanes
        self._check(to, sources, taken)
        to.count(shared=True)
        block = machine.block_of_lane[lanes]
        granules = clocks.granules(block, to.addresses, to.width)
        of_lanes = clocks.agents_of_lanes[lanes]
        warps, lane_of = np.unique(of_lanes, return_inverse=True)
        agents, known = begin(clocks, warps)
        if (bad := self._twice(granules) | np.any(clocks.pending[granules], axis=-1)).any():
            to.blame(bad, "overwrites a pending copy", "copies to where another copy is under way")
        races.of_copies(to, granules, np.broadcast_to(agents[lane_of], to.addresses.shape))
        clocks.pending[granules] = True
        clocks.any_pending = True
        clocks.tick(agents)
        flat = block * machine.shared_pitch + to.addresses
        begun = Copies(to.batch, lanes, to.width, flat, sources, taken, granules, of_lanes, known[lane_of])
        self.groups.begin(begun, lanes)

    def _check(self, to: Access, sources: Array, taken: Array | None) -> None:
        machine, batch, width, lanes = to.machine, to.batch, to.width, to.lanes
        to.check_alignment()
        Access(machine, batch, sources, width, lanes, "copies from").check_alignment()
        if (there := to.addresses >> CLUSTER_SHIFT != 0).any():
            to.blame(there, "wrong memory", "copies to the shared memory of another block")
        to.shared_places()
        if taken is not None and (bad := taken > width).any():
            text = f"reads {int(taken[bad][0])} bytes for a copy of {width}: src-size is at most that"
            to.blame(bad, "out of bounds", text)
        for count in (width,) if taken is None else np.unique(taken[taken > 0]).tolist():
            some = np.ones(sources.shape, np.bool_) if taken is None else taken == count
            for buffer, where in machine.memory.find(sources[some], count):
                if buffer is None:
                    some[some] = True if where is None else where
                    Access(machine, batch, sources, count, lanes, "copies from").out_of_bounds(some)

    def _twice(self, granules: Array) -> Lanes:
        """Return which copies (n, lanes) share a granule with another of them."""
        numbers = np.arange(granules.size, dtype=np.int32).reshape(granules.shape)
        self._claims[granules] = numbers
        return np.any(self._claims[granules] != numbers, axis=-1)

    def wait(self, lanes: Array, allowed: int) -> None:
        """Complete copies of these lanes so that at most `allowed` groups of each are under way."""
        for copies, due in self.groups.wait(lanes, allowed):
            self._complete(copies, slice(None) if due.all() else due)

    def _complete(self, copies: Copies, some: slice | Lanes) -> None:
        machine = self.machine
        lanes, to, source = copies.lanes[some], copies.to[:, some], copies.source[:, some]
        taken = None if copies.taken is None else copies.taken[:, some]
        data = self._read(copies, lanes, source, taken)
        rows = machine.shared.reshape(-1).view(f"V{copies.size}")
        rows[to // copies.size] = data.view(f"V{copies.size}")[..., 0]
        clocks = machine.clocks
        clocks.pending[copies.granules[:, some]] = False
        # One lane of each warp is enough: all lanes of a warp share a clock.
        agents, first = np.unique(copies.agents[some], return_index=True)
        clocks.join(agents, copies.clocks[some][first])
        if machine.counts is not None:
            machine.counts.copied_bytes += data.size

    def _read(self, copies: Copies, lanes: Array, source: Array, taken: Array | None) -> Array:
        """Return the bytes that arrive, (n, lanes, size): `taken` bytes of global memory, then zeros."""
        access = Access(self.machine, copies.batch, source, copies.size, lanes, "reads")
        if taken is None:
            return fetch(access, "global")
        data = np.zeros((*source.shape, copies.size), np.uint8)
        for row in range(len(copies.batch)):
            for count in np.unique(taken[row][taken[row] > 0]):
                some = taken[row] == count
                for width, offset in _pieces(int(count)):
                    piece = access.part(row, some)
                    piece.width, piece.addresses = width, piece.addresses + offset
                    data[row, some, offset : offset + width] = fetch(piece, "global")[0]
        return data


def _pieces(count: int) -> list[tuple[int, int]]:
    """Cut `count` bytes, at most 16, into (width, offset) with powers of 2 as widths, largest first."""
    return [(width, count & -2 * width) for width in (16, 8, 4, 2, 1) if count & width]


@unit("cp.async.ca", "cp.async.cg", order="store", results=0, counted="async copy")
def cp_async(batch: Batch) -> Run:
    """cp.async.cg.shared.global [dst], [src], size{, src-size or ignore-src}."""
    width = batch.constant(2)
    if width not in (4, 8, 16) or any("cache_hint" in word for word in batch.first.opcode):
        raise EmulatorError(f"this form of cp.async is not emulated: {batch.first.text}")
    to, source = batch.address(0), batch.address(1)
    ignored = isinstance(batch.first.operands[-1], Register) and batch.first.operands[-1].file == "pred"
    taken = batch.source(3, "pred" if ignored else "u32") if batch.has(3) else None

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        shape = (len(batch), machine.lanes)
        shared, sources = (np.broadcast_to(read(machine), shape)[:, lanes] for read in (to, source))
        counts = None
        if taken is not None:
            given = np.broadcast_to(taken(machine), shape)[:, lanes]
            counts = np.where(given, 0, width) if ignored else given.astype(np.int64)
            if (counts == width).all():
                counts = None
        offsets = in_shared_window(machine, shared, lanes)
        copy = Access(machine, batch, offsets, width, lanes, "copies to")
        machine.state(AsyncCopies).begin(copy, sources, counts)

    return run


@unit_of_lanes("cp.async.commit_group", order="fence", counted="wait")
def commit_group(machine: Machine, lanes: Array) -> None:
    """cp.async.commit_group: close the group of copies that each thread has begun since the last."""
    machine.state(AsyncCopies).groups.commit(lanes)


@unit_of_lanes("cp.async.wait_group", order="fence", operands=("constant",), counted="wait")
def wait_group(machine: Machine, lanes: Array, allowed: int) -> None:
    """cp.async.wait_group n: wait until at most the last n groups of the thread are under way."""
    machine.state(AsyncCopies).wait(lanes, allowed)
