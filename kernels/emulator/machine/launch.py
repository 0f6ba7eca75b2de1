"""A launch: a kernel, its grid and arguments, and what all machines of the launch share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ptx.program import Program
from .counts import Counts
from .global_memory import GlobalMemory
from .shape import MachineShape, Registers

# Limits of an H100 (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MULTIPROCESSORS, THREADS_EACH, BLOCKS_EACH, SHARED_EACH = 132, 2048, 32, 228 * 1024
RESERVED = 1024  # bytes of shared memory that the GPU adds to each block


@dataclass
class Launch:
    """A kernel with its launch configuration, its memory, and the state of the grid's barrier."""

    program: Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: dict[str, bytes]
    memory: GlobalMemory
    shared: int = 0  # bytes of dynamic shared memory
    cluster: int = 1
    counts: Counts | None = None
    arrived: int = 0  # threads that wait at the grid's barrier
    phase: int = 0  # how often the whole grid has met there
    _shapes: dict[int, MachineShape] = field(default_factory=dict)
    _spare: list[Registers] = field(default_factory=list)  # of machines that have ended

    @property
    def blocks(self) -> int:
        """The number of blocks in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """The number of threads in a block."""
        return self.block[0] * self.block[1] * self.block[2]

    def shape(self, blocks: int) -> MachineShape:
        """Return the lanes of a machine with this many blocks."""
        if blocks not in self._shapes:
            self._shapes[blocks] = MachineShape(blocks, self.block)
        return self._shapes[blocks]

    def registers(self, rows: dict[str, int], blocks: int) -> Registers:
        """Return registers for such a machine. They may still hold the values of an ended machine."""
        lanes = self.shape(blocks).lanes
        for spare in self._spare:
            if spare.rows is rows and spare.lanes == lanes:
                self._spare.remove(spare)
                return spare
        return Registers(rows, lanes)

    def give_back(self, registers: Registers) -> None:
        """Keep the registers of an ended machine for the next one."""
        self._spare.append(registers)

    @property
    def blocks_at_once(self) -> int:
        """How many blocks of this kernel an H100 holds at a time."""
        shared = self.program.shared + self.shared + RESERVED
        each = min(BLOCKS_EACH, THREADS_EACH // (-(-self.threads // 32) * 32), SHARED_EACH // shared)
        return MULTIPROCESSORS * max(each, 1)
