"""What a kernel did: instructions by class, sectors of global memory, bank conflicts, matrix instructions.

The unit is a warp's instruction, as in a profiler. A request to global memory moves 32-byte sectors: 4 for a
warp whose 32 threads read neighbouring 4-byte words, up to 32 for one that does not coalesce (CUDA C++ Best
Practices Guide, "Coalesced Access to Global Memory"). Shared memory has 32 banks of 4 bytes; a request takes
as many passes as its busiest bank has different words, and a wide one is taken in parts of 128 bytes; to
atomics, as many as its busiest bank has threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    load_bytes: int = 0  # that threads asked for
    store_bytes: int = 0
    shared_requests: int = 0
    shared_passes: int = 0
    shared_least: int = 0  # passes that the width of the requests takes without conflicts
    matrix: int = 0  # mma and wgmma instructions

    def add(self, other: LineCounts) -> None:
        """Add the counts of `other`."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Counts:
    """The counts of a launch: in all, by class of instruction, and by line of source."""

    classes: Counter[str] = field(default_factory=Counter)
    lines: dict[str, LineCounts] = field(default_factory=dict)
    matrix_flops: int = 0
    copied_bytes: int = 0  # by cp.async and TMA, into shared memory

    @property
    def total(self) -> LineCounts:
        """The counts of all lines together."""
        total = LineCounts()
        for line in self.lines.values():
            total.add(line)
        return total

    def line(self, instruction: PtxInstruction) -> LineCounts:
        """Return the counts of the line that an instruction belongs to."""
        return self.lines.setdefault(str(instruction.location or "unknown line"), LineCounts())

    def step(self, shape: MachineShape, instructions: Sequence[PtxInstruction], mask: Mask) -> None:
        """Count a step: for each instruction the warps that have a lane in it."""
        warps = shape.warps if mask is None else int(mask.reshape(-1, 32).any(axis=1).sum())
        for instruction in instructions:
            self.classes[class_of(instruction.opcode)] += warps
            self.line(instruction).instructions += warps

    def global_access(
        self,
        shape: MachineShape,
        instructions: Sequence[PtxInstruction],
        places: Array,
        width: int,
        lanes: Array,
        write: bool,
    ) -> None:
        """Count requests to global memory: places (instructions, lanes), the addresses of `width` bytes."""
        for row, instruction in enumerate(instructions):
            requests, sectors = _sectors(shape, places[row], width, lanes)
            line = self.line(instruction)
            if write:
                line.stores += requests
                line.store_sectors += sectors
                line.store_bytes += lanes.size * width
            else:
                line.loads += requests
                line.load_sectors += sectors
                line.load_bytes += lanes.size * width

    def shared_access(
        self,
        shape: MachineShape,
        instructions: Sequence[PtxInstruction],
        places: Array,
        width: int,
        lanes: Array,
        update: bool = False,
    ) -> None:
        """Count requests to shared memory: places (instructions, lanes), the addresses of `width` bytes.

        update: by atomics, for which threads that share a word take their turns, too.
        """
        for row, instruction in enumerate(instructions):
            requests, passes, least = _passes(shape, places[row], width, lanes, update)
            line = self.line(instruction)
            line.shared_requests += requests
            line.shared_passes += passes
            line.shared_least += least

    def shared_rows(self, instruction: PtxInstruction, rows: Array) -> None:
        """Count ldmatrix or stmatrix: rows (..., 8), addresses of 16 bytes; 8 rows are one pass, at best."""
        line = self.line(instruction)
        banks = np.sort(rows // 16 % 8, axis=-1)
        # The rows that fall on the busiest sixteen bytes of the 128 that a pass brings.
        busiest = np.stack([(banks == bank).sum(axis=-1) for bank in range(8)]).max(axis=0)
        line.shared_requests += busiest.size
        line.shared_passes += int(busiest.sum())
        line.shared_least += busiest.size

    def matrix(self, instruction: PtxInstruction, count: int, flops: int) -> None:
        """Count `count` matrix instructions of `flops` operations each."""
        self.line(instruction).matrix += count
        self.matrix_flops += count * flops


def class_of(opcode: tuple[str, ...]) -> str:
    """Return the class under which an instruction is counted."""
    name, words = opcode[0], set(opcode)
    if name in ("ld", "st", "atom", "red", "ldu"):
        space = next(
            (w for w in ("shared", "local", "param", "const") if any(o.startswith(w) for o in opcode)),
            "global",
        )
        return f"{ {'ld': 'load', 'ldu': 'load', 'st': 'store'}.get(name, 'atomic') } {space}"
    if name in ("mma", "wgmma"):
        return (
            "matrix"
            if {"mma_async", "sync"} & words and not {"fence", "commit_group", "wait_group"} & words
            else "wait"
        )
    if name == "cp":
        return "wait" if {"commit_group", "wait_group", "wait_all"} & words else "async copy"
    if name in ("ldmatrix", "stmatrix"):
        return name
    if name in ("bar", "barrier", "mbarrier", "membar", "fence"):
        return "barrier"
    if name in ("bra", "ret", "exit", "call", "trap"):
        return "branch"
    if name in ("fma", "mad") and opcode[-1].startswith(("f", "bf")):
        return "multiply-add"
    if opcode[-1].startswith(("f16", "f32", "f64", "bf16")) and name not in ("mov", "cvt", "selp", "setp"):
        return "other float"
    if name in ("mov", "cvt", "cvta", "selp", "setp"):
        return "move and compare"
    return "integer"


def _by_warp(shape: MachineShape, places: Array, lanes: Array) -> tuple[Array, Array]:
    """Spread addresses of some lanes over (warps, 32), and say which are there."""
    spread = np.zeros(shape.lanes, np.int64)
    there = np.zeros(shape.lanes, np.bool_)
    spread[lanes] = places
    there[lanes] = True
    warps = there.reshape(-1, 32).any(axis=1)
    return spread.reshape(-1, 32)[warps], there.reshape(-1, 32)[warps]


def _sectors(shape: MachineShape, places: Array, width: int, lanes: Array) -> tuple[int, int]:
    """Return (requests, sectors) of a warp-wide access."""
    spread, there = _by_warp(shape, places, lanes)
    touched = spread[..., None] // SECTOR + np.arange(-(-width // SECTOR))
    touched = np.where(there[..., None], touched, -1).reshape(len(spread), -1)
    touched.sort(axis=1)
    new = np.ones(touched.shape, np.bool_)
    new[:, 1:] = touched[:, 1:] != touched[:, :-1]
    return len(spread), int((new & (touched >= 0)).sum())


def _passes(
    shape: MachineShape, places: Array, width: int, lanes: Array, update: bool
) -> tuple[int, int, int]:
    """Return (requests, passes, passes without conflicts) of a warp-wide access to shared memory."""
    spread, there = _by_warp(shape, places, lanes)
    words = max(1, width // 4)
    # 8 bytes a thread: half a warp at a time; 16 bytes: a quarter.
    spread = spread.reshape(len(spread), words, -1)
    there = there.reshape(spread.shape)
    word = (spread[..., None] // 4 + np.arange(words)).reshape(len(spread), words, -1)
    held = np.repeat(there, words, axis=-1)
    key = np.where(held, word, -1)
    key.sort(axis=-1)
    new = np.ones(key.shape, np.bool_)
    if not update:
        new[..., 1:] = key[..., 1:] != key[..., :-1]
    new &= key >= 0
    per_bank = np.zeros((*key.shape[:-1], BANKS), np.int64)
    index = np.indices(key.shape)
    np.add.at(per_bank, (index[0], index[1], key % BANKS), new)
    parts = there.any(axis=-1)
    return len(spread), int(np.maximum(per_bank.max(axis=-1), parts).sum()), int(parts.sum())
