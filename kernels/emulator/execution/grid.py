"""A launch: what all its machines share, and the order in which they run.

A machine has some blocks of the grid. Machines run one after another, since a kernel must work in any order
of its blocks; but blocks that are on a GPU at once may wait for each other, by flags in global memory or by a
barrier of the whole grid. So a machine that cannot go on is kept, the next one starts, and those that wait
try again when memory has changed, until there are more blocks than a GPU holds at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..base.shape import MachineShape, Registers
from ..ptx.fault import Fault

if TYPE_CHECKING:
    from ..memory.global_memory import GlobalMemory
    from ..ptx.program import Program
    from .counts import Counts
    from .machine import Machine
    from .schedule import Code

# Of an H100 (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MULTIPROCESSORS, THREADS_EACH, BLOCKS_EACH, SHARED_EACH = 132, 2048, 32, 228 * 1024
RESERVED = 1024  # bytes of shared memory that each block takes for itself


@dataclass
class Launch:
    """A kernel and its launch configuration, memory, and what its blocks have in common."""

    program: Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: dict[str, bytes]
    memory: GlobalMemory
    shared: int = 0  # bytes of dynamic shared memory
    cluster: int = 1
    counts: Counts | None = None
    come: int = 0  # threads that have come to the grid's barrier
    phase: int = 0  # how often all of them have
    _shapes: dict[int, MachineShape] = field(default_factory=dict)
    _spare: list[Registers] = field(default_factory=list)  # of machines that have ended

    @property
    def blocks(self) -> int:
        """The blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    def shape(self, blocks: int) -> MachineShape:
        """The lanes of a machine of so many blocks."""
        if blocks not in self._shapes:
            self._shapes[blocks] = MachineShape(blocks, self.block)
        return self._shapes[blocks]

    def registers(self, code: Code, blocks: int) -> Registers:
        """Registers for such a machine: what they hold is what the machine before left there."""
        lanes = self.shape(blocks).lanes
        for spare in self._spare:
            if spare.rows is code.registers and spare.lanes == lanes:
                self._spare.remove(spare)
                return spare
        return Registers(code.registers, lanes)

    def give_back(self, registers: Registers) -> None:
        """Take the registers of a machine that has ended."""
        self._spare.append(registers)

    @property
    def at_once(self) -> int:
        """Blocks that the largest GPU so far holds at a time."""
        shared = self.program.shared + self.shared + RESERVED
        each = min(BLOCKS_EACH, THREADS_EACH // (-(-self.threads // 32) * 32), SHARED_EACH // shared)
        return MULTIPROCESSORS * max(each, 1)


def run_grid(launch: Launch, machines: Iterator[Machine]) -> None:
    """Run all machines of a launch to their end. Raises Fault, also where blocks wait for ever."""
    waiting: list[Machine] = []
    for machine in machines:
        waiting = _try_again(launch, waiting)
        if machine.run():
            continue
        waiting.append(machine)
        held = sum(one.blocks for one in waiting)
        if held > launch.at_once:
            _give_up(
                waiting[0],
                f"; they may wait for blocks that cannot start: a GPU of {MULTIPROCESSORS} multiprocessors "
                f"holds {launch.at_once} blocks of this kernel at a time, and the grid has {launch.blocks}",
            )
    if waiting := _try_again(launch, waiting):
        _give_up(waiting[0], "")


def _try_again(launch: Launch, waiting: list[Machine]) -> list[Machine]:
    """Run those that wait while that changes memory; return those that still wait."""
    while any(machine.saw != launch.memory.changes for machine in waiting):
        waiting = [machine for machine in waiting if not machine.run()]
    return waiting


def _give_up(machine: Machine, more: str) -> None:
    verdict = machine.verdict
    assert verdict is not None
    raise Fault(verdict.kind, verdict.message + more, verdict.where, verdict.instruction)
