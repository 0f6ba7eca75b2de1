"""Count what a kernel does: instructions by class, sectors of global memory, bank conflicts, matrix work.

The unit is a warp's instruction, as in a profiler. A request to global memory moves 32-byte sectors: 4 if a
warp's 32 threads read neighbouring 4-byte words, up to 32 if the request does not coalesce (CUDA C++ Best
Practices Guide, "Coalesced Access to Global Memory"). Shared memory has 32 banks of 4 bytes. A request takes
as many passes as its busiest bank has different words, an atomic as many as that bank has threads. Wide
requests are split into parts of 128 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ptx.dtypes import Array, Mask
from ..ptx.program import PtxInstruction
from .shape import MachineShape

SECTOR = 32  # bytes
BANKS = 32


@dataclass
class LineCounts:
    """The counts of one line of source, or of a whole kernel."""

    instructions: int = 0  # of warps
    loads: int = 0  # requests of warps to global memory
    stores: int = 0
    load_sectors: int = 0
    store_sectors: int = 0
    load_bytes: int = 0  # that threads read
    store_bytes: int = 0
    shared_requests: int = 0
    shared_passes: int = 0
    shared_least: int = 0  # passes that the requests would take without conflicts
    matrix: int = 0  # mma and wgmma instructions

    def add(self, other: LineCounts) -> None:
        """Add the counts of `other`."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Counts:
    """The counts of a launch, by class of instruction and by source line."""

    classes: Counter[str] = field(default_factory=Counter)
    lines: dict[str, LineCounts] = field(default_factory=dict)
    matrix_flops: int = 0
    copied_bytes: int = 0  # by cp.async and TMA, into shared memory
    tensor_bytes: int = 0  # by TMA alone, whose loads are in no sectors

    @property
    def total(self) -> LineCounts:
        """The sum over all lines."""
        total = LineCounts()
        for line in self.lines.values():
            total.add(line)
        return total

    def line(self, instruction: PtxInstruction) -> LineCounts:
        """Return the counts of an instruction's source line."""
        return self.lines.setdefault(str(instruction.location or "unknown line"), LineCounts())

    def step(
        self, shape: MachineShape, instructions: Sequence[PtxInstruction], mask: Mask, counted: str
    ) -> None:
        """Count each instruction, of class `counted`, once for every warp with an active lane."""
        warps = shape.warps if mask is None else int(mask.reshape(-1, 32).any(axis=1).sum())
        for instruction in instructions:
            self.classes[counted] += warps
            self.line(instruction).instructions += warps

    def access(self, access: Any, shared: bool) -> None:
        """Count the requests of an `Access` to global or shared memory.

        Atomics on one word of shared memory conflict.
        """
        lanes, width, shape = access.lanes, access.width, access.machine.shape
        for addresses, instruction in zip(access.addresses, access.batch.instructions, strict=True):
            line = self.line(instruction)
            if shared:
                requests, passes, least = _passes(shape, addresses, width, lanes, access.kind == "updates")
                line.shared_requests += requests
                line.shared_passes += passes
                line.shared_least += least
                continue
            requests, sectors = _sectors(shape, addresses, width, lanes)
            if access.kind == "reads":
                line.loads += requests
                line.load_sectors += sectors
                line.load_bytes += lanes.size * width
            else:
                line.stores += requests
                line.store_sectors += sectors
                line.store_bytes += lanes.size * width

    def matrix(self, instruction: PtxInstruction, count: int, flops: int) -> None:
        """Count `count` matrix instructions of `flops` operations each."""
        self.line(instruction).matrix += count
        self.matrix_flops += count * flops


def by_warp(shape: MachineShape, addresses: Array, lanes: Array) -> tuple[Array, Array]:
    """Return the addresses of some lanes as (warps, 32), and which of these are used."""
    spread = np.zeros(shape.lanes, np.int64)
    there = np.zeros(shape.lanes, np.bool_)
    spread[lanes] = addresses
    there[lanes] = True
    warps = there.reshape(-1, 32).any(axis=1)
    return spread.reshape(-1, 32)[warps], there.reshape(-1, 32)[warps]


def _sectors(shape: MachineShape, addresses: Array, width: int, lanes: Array) -> tuple[int, int]:
    """Return (requests, sectors) of a warp-wide access."""
    spread, there = by_warp(shape, addresses, lanes)
    touched = spread[..., None] // SECTOR + np.arange(-(-width // SECTOR))
    touched = np.where(there[..., None], touched, -1).reshape(len(spread), -1)
    touched.sort(axis=1)
    return len(spread), int((np.diff(touched, axis=1, prepend=-1) != 0).sum())


def _passes(
    shape: MachineShape, addresses: Array, width: int, lanes: Array, update: bool
) -> tuple[int, int, int]:
    """Return (requests, passes, passes without conflicts) of a warp-wide access to shared memory."""
    spread, there = by_warp(shape, addresses, lanes)
    words = max(1, width // 4)
    # With 8 bytes a thread, half a warp goes at a time; with 16 bytes, a quarter.
    spread = spread.reshape(len(spread), words, -1)
    there = there.reshape(spread.shape)
    word = (spread[..., None] // 4 + np.arange(words)).reshape(len(spread), words, -1)
    held = np.repeat(there, words, axis=-1)
    key = np.where(held, word, -1)
    key.sort(axis=-1)
    new = key >= 0 if update else np.diff(key, axis=-1, prepend=-1) != 0
    per_bank = np.zeros((*key.shape[:-1], BANKS), np.int64)
    index = np.indices(key.shape)
    np.add.at(per_bank, (index[0], index[1], key % BANKS), new)
    parts = there.any(axis=-1)
    return len(spread), int(np.maximum(per_bank.max(axis=-1), parts).sum()), int(parts.sum())
