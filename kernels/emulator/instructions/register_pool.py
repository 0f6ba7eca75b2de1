"""setmaxnreg: some warp groups give registers back to their block, and others take them.

A block begins with the registers for each thread that its kernel was compiled for. dec moves registers to a
pool, and inc takes them from there or waits. If all warps together want more than the block has, inc waits
for ever: a fault, with the numbers (PTX ISA, "Miscellaneous Instructions: setmaxnreg").
"""

from __future__ import annotations

import numpy as np

from ..base.addresses import whole_warps
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Lanes, Mask
from ..ptx.fault import EmulatorError
from ..ptx.program import Program
from .tensor_copies import BulkCopies

REGISTERS = 65536  # of a multiprocessor
LARGEST = 255  # of a thread
UNIT = 8  # registers of a thread come in multiples of this


def at_launch(program: Program, threads: int) -> int:
    """Return each thread's registers at the start: .maxnreg or the launch bounds', else EmulatorError."""
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
    """The registers that each warp holds and each block has left, counted for one thread of a warp."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.start = at_launch(machine.program, machine.threads)
        self.held = np.full(machine.warps, self.start, np.int64)
        self.pool = np.zeros(machine.blocks, np.int64)
        self.waiting: dict[int, int] = {}  # by warp: the count that it waits for
        # Explain after copies, which may let lanes go on, and before mbarriers: this fault is their cause.
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
        """inc by a warp; return whether it got the registers."""
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
        """Fault when no lane can go on: name a warp that waits for registers for ever."""
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


@unit("setmaxnreg", order="barrier", results=0)
def setmaxnreg(batch: Batch) -> Run:
    """setmaxnreg.inc and .dec.sync.aligned.u32 count."""
    count, grows = batch.constant(0), batch.first.opcode[1] == "inc"
    if not 24 <= count <= 256 or count % UNIT:
        raise EmulatorError(f"setmaxnreg takes a multiple of {UNIT} from 24 to 256: {batch.first.text}")

    def run(machine: Machine, mask: Mask) -> Lanes:
        pool = machine.state(RegisterPool)
        passed = np.ones(machine.lanes, np.bool_)
        for warp in np.unique(machine.warp_of_lane[whole_warps(machine, mask)]).tolist():
            if grows:
                passed[32 * warp : 32 * warp + 32] = pool.increase(warp, count)
            else:
                pool.decrease(warp, count)
        return passed

    return run
