"""Find races in global memory: the last accesses to each element, and whether they are ordered.

As in shared memory (`races_in_shared_memory`), two accesses race if one of them writes and neither happens
before the other. Blocks are unordered unless the kernel orders them by atomics or a barrier of the grid.
Path searches in graphs rely on two exceptions, which no GPU minds: writes of the value that is already there,
and reads of an element that another thread writes after a look at it (`DataFlow.stores_decided_by_loads`).

History is kept for granules as wide as the narrowest access so far. Two readers of a granule are kept, from
different warps: whichever warp writes next, at least one of them is another warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..machine.machine_state import Machine
from ..ptx.dtypes import Array
from .access import Access

QUIET = 1 << 20  # a bit of a packed name: a write that readers don't mind


@dataclass(frozen=True)
class Conflict:
    """Two accesses that race: the later one by its index, and facts about the earlier one."""

    index: int  # of the later access, among those to be noted
    warp: int  # numbered over the grid
    instruction: int  # its number, counted from 1
    wrote: bool


class History:
    """The last accesses to a buffer of `size` bytes that starts at `start`."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        self.granule = 16  # bytes
        count = self._count()
        # A name packs 1 + the warp above bit 21, QUIET, and the instruction's number; 0 stands for nobody.
        self.writer = np.zeros(count, np.int64)
        self.written = np.zeros(count, np.int32)  # the warp's time then
        self.readers = np.zeros((2, 0), np.int64)
        self.read = np.zeros((2, 0), np.int32)

    def note(self, access: Access, same: Array | None = None) -> Conflict | None:
        """Note one instruction's access, or return its first race instead.

        same: which of its writes leave the memory as it is.
        """
        if access.width < self.granule:
            self._refine(access.width)
        shift = self.granule.bit_length() - 1
        first = (access.addresses[0] >> shift) - (self.start >> shift)
        count = -(-access.width // self.granule)
        granules = first if count == 1 else (first[:, None] + np.arange(count)).reshape(-1)
        machine = access.machine
        agents = machine.clocks.agents_of_lanes[access.lanes]
        warps = machine.first * machine.warps_per_block + machine.warp_of_lane[access.lanes]
        times = machine.clocks.own(agents)
        names = (1 + warps) << 21 | access.batch.first.number
        if count > 1:
            agents, warps, times, names = (np.repeat(one, count) for one in (agents, warps, times, names))
        silent = None if same is None else np.repeat(same, count)
        conflict = self._conflict(access, granules, agents, warps, silent)
        if conflict is None:
            if access.kind == "reads":
                self._note_read(granules, names, times)
                return None
            if silent is not None and silent.any():
                # The warp that wrote this value first stays the writer.
                new = ~silent | (self.writer[granules] == 0)
                names = np.where(silent, names | QUIET, names)
                granules, names, times = granules[new], names[new], times[new]
            self.writer[granules] = names if access.kind == "writes" else names | QUIET
            self.written[granules] = times
        return conflict

    def _conflict(
        self, access: Access, granules: Array, agents: Array, warps: Array, silent: Array | None
    ) -> Conflict | None:
        names, times = self.writer[granules], self.written[granules]
        if access.kind in ("reads", "updates"):
            names = np.where(names & QUIET, 0, names)
        earlier = [(names, times)]
        if access.kind == "writes" and self.readers.size:
            earlier += [(self.readers[i][granules], self.read[i][granules]) for i in (0, 1)]
        for i, (names, times) in enumerate(earlier):
            races = _unordered(access.machine, names, times, agents, warps)
            if races is not None and silent is not None:
                races &= ~silent
            if races is not None and races.any():
                at = int(np.argmax(races))
                name, count = int(names[at]), granules.size // access.lanes.size
                return Conflict(at // count, (name >> 21) - 1, name & (QUIET - 1), i == 0)
        return None

    def _note_read(self, granules: Array, names: Array, times: Array) -> None:
        if not self.readers.size:
            self.readers = np.zeros((2, self.writer.size), np.int64)
            self.read = np.zeros((2, self.writer.size), np.int32)
        last, before = self.readers
        other = (last[granules] ^ names) >> 21 != 0  # of another warp
        if other.any():
            moved = granules[other]
            before[moved], self.read[1, moved] = last[moved], self.read[0, moved]
        last[granules] = names
        self.read[0, granules] = times
        # Where several warps read a granule at once, the last name stays, and one of the others.
        lost = (last[granules] ^ names) >> 21 != 0
        if lost.any():
            before[granules[lost]], self.read[1, granules[lost]] = names[lost], times[lost]

    def _refine(self, width: int) -> None:
        """Split the history into granules of `width` bytes."""
        old, shift = self.granule, self.start // width - self.start // self.granule * (self.granule // width)
        self.granule = width
        count = self._count()
        parts = old // width

        def finer(kept: Array) -> Array:
            return np.repeat(kept, parts, axis=-1)[..., shift : shift + count]

        self.writer, self.written = finer(self.writer), finer(self.written)
        if self.readers.size:
            self.readers, self.read = finer(self.readers), finer(self.read)

    def _count(self) -> int:
        return (self.start + self.size - 1) // self.granule - self.start // self.granule + 1


def _unordered(
    machine: Machine, names: Array, times: Array, agents: Array, warps: Array
) -> NDArray[np.bool_] | None:
    """Return where a warp does not know of another warp's earlier access; None for nowhere."""
    others = (names >> 21) - 1
    strange: NDArray[np.bool_] = (names != 0) & (others != warps)
    if not strange.any():
        return None
    block, warp = others // machine.warps_per_block - machine.first, others % machine.warps_per_block
    here = (block >= 0) & (block < machine.blocks)
    own = (warps // machine.warps_per_block - machine.first) // machine.cluster
    near = here & (block // machine.cluster == own)  # blocks of one cluster know each other's clocks
    inside = block % machine.cluster * machine.clocks.of_block + warp
    known = machine.clocks.knows(agents, np.where(near, inside, 0))
    strange &= np.where(near, times > known, machine.memory.watch_blocks)
    return strange
