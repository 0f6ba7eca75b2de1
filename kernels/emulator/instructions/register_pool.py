"""setmaxnreg: warp groups give registers back to their block, and others take them.

PTX ISA, "Miscellaneous Instructions: setmaxnreg". A block begins with as many registers for each thread as it
was compiled for; registers that dec frees go to a pool, and inc takes them from there or waits. What all
warps want must not be more than the block has, else inc waits for ever: a fault, with the numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..base.addresses import whole_warps
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..copies.bulk_copies import BulkCopies
from ..machine.machine import Machine
from ..ptx.dtypes import Mask
from ..ptx.fault import EmulatorError
from ..ptx.operands import Immediate
from ..ptx.program import Program

REGISTERS = 65536  # of a multiprocessor
LARGEST = 255  # of a thread, as the compiler deals them out
UNIT = 8  # registers of a thread are dealt out by so many


def at_launch(program: Program, threads: int) -> int:
    """Return the registers of each thread when the kernel begins: .maxnreg, or what the launch bounds leave.

    Raises EmulatorError where the kernel has neither: setmaxnreg may then have no effect.
    """
    if "maxnreg" in program.directives:
        return program.directives["maxnreg"][0] // UNIT * UNIT
    bounds = program.directives.get("maxntid") or program.directives.get("reqntid")
    if bounds is None:
        raise EmulatorError(
            "setmaxnreg needs launch bounds (.maxntid or .maxnreg): compile the kernel with them"
        )
    blocks = program.directives.get("minnctapersm", (1,))[0]
    most = max(int(np.prod(bounds)), threads)
    return min(REGISTERS // (most * blocks), LARGEST) // UNIT * UNIT


class RegisterPool:
    """The registers that each warp holds, and that each block has left, counted for one thread of a warp."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.start = at_launch(machine.program, machine.threads)
        self.held = np.full(machine.warps, self.start, np.int64)
        self.pool = np.zeros(machine.blocks, np.int64)
        self.waiting: dict[int, int] = {}  # warp: what it waits for
        # After copies that may let others go on, and before the last word on mbarriers: this is the cause.
        machine.state(BulkCopies)
        machine.late.insert(1, self._explain)

    def decrease(self, warp: int, count: int) -> None:
        """dec by a warp."""
        if self.held[warp] < count:
            self._blame(warp, f"setmaxnreg.dec to {count}, and the warp holds {self.held[warp]}: use inc")
        self.pool[warp // self.machine.warps_per_block] += self.held[warp] - count
        self.held[warp] = count
        self.machine.events += 1

    def increase(self, warp: int, count: int) -> bool:
        """inc by a warp; returns whether it got them."""
        if self.held[warp] > count:
            self._blame(warp, f"setmaxnreg.inc to {count}, and the warp holds {self.held[warp]}: use dec")
        block = warp // self.machine.warps_per_block
        needed = count - self.held[warp]
        if needed > self.pool[block]:
            self.waiting[warp] = count
            return False
        self.pool[block] -= needed
        self.held[warp] = count
        self.waiting.pop(warp, None)
        return True

    def _explain(self) -> bool:
        """When nothing can go on any more: say who waits for registers that never come."""
        if self.waiting:
            warp, count = next(iter(self.waiting.items()))
            machine = self.machine
            block = warp // machine.warps_per_block
            mine = slice(block * machine.warps_per_block, (block + 1) * machine.warps_per_block)
            wants = sum(self.waiting.get(w, int(self.held[w])) for w in range(mine.start, mine.stop))
            self._blame(
                warp,
                f"setmaxnreg.inc to {count} waits for ever: the block's {machine.warps_per_block} warps want "
                f"{32 * wants} registers, and it began with {32 * machine.warps_per_block * self.start} "
                f"({self.start} for each thread)",
            )
        return False

    def _blame(self, warp: int, text: str) -> None:
        self.machine.fault_at("registers", f"runs {text}", 32 * warp)


@unit("setmaxnreg", order="sync", results=0)
def setmaxnreg(batch: Batch) -> Run:
    """setmaxnreg.inc and .dec.sync.aligned.u32 count."""
    operand, opcode = batch.first.operands[0], batch.first.opcode
    if not isinstance(operand, Immediate) or not 24 <= operand.value <= 256 or operand.value % UNIT:
        raise EmulatorError(f"setmaxnreg takes a multiple of {UNIT} from 24 to 256: {batch.first.text}")
    count, grows = operand.value, opcode[1] == "inc"

    def run(machine: Machine, mask: Mask) -> NDArray[np.bool_]:
        pool = machine.state(RegisterPool)
        passed = np.ones(machine.lanes, np.bool_)
        for warp in np.unique(machine.warp_of_lane[whole_warps(machine, mask)]).tolist():
            if grows:
                passed[32 * warp : 32 * warp + 32] = pool.increase(warp, count)
            else:
                pool.decrease(warp, count)
        return passed

    return run
