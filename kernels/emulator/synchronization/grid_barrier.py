"""The barrier of a whole grid: `cuda.cg.this_grid().sync()`.

Numba calls two functions of CUDA's device runtime for it, which a linker would add (CUDA C++ Programming
Guide, "Grid Synchronization"). All blocks must be on the GPU at once; `execution.grid` checks that.
"""

from __future__ import annotations

import numpy as np

from ..base.addresses import lanes_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..ptx.dtypes import Lanes, Mask
from ..ptx.operands import Symbol


class GridBarrier:
    """The phase of the grid's barrier at which each lane of a machine waits."""

    def __init__(self, machine: Machine) -> None:
        self.phase = np.full(machine.lanes, -1, np.int64)  # -1: does not wait


@unit("call.cudaCGGetIntrinsicHandle", order="fence", results=0)
def handle(batch: Batch) -> Run:
    """Return a handle for the grid: any number but 0."""
    returned, _ = (operand.offset for operand in batch.first.operands if isinstance(operand, Symbol))

    def run(machine: Machine, mask: Mask) -> None:
        machine.local[lanes_of(machine, mask), returned : returned + 8] = 1

    return run


@unit("call.cudaCGSynchronize", order="sync", results=0)
def synchronize(batch: Batch) -> Run:
    """Wait until all threads of the grid have arrived."""
    returned = next(operand.offset for operand in batch.first.operands if isinstance(operand, Symbol))

    def run(machine: Machine, mask: Mask) -> Lanes:
        launch, barrier = machine.launch, machine.state(GridBarrier)
        lanes = lanes_of(machine, mask)
        new = lanes[barrier.phase[lanes] < 0]
        barrier.phase[new] = launch.phase
        launch.arrived += new.size
        if launch.arrived == launch.blocks * launch.threads:
            launch.arrived, launch.phase = 0, launch.phase + 1
            launch.memory.order_all()
            machine.events += 1
        over = lanes[barrier.phase[lanes] < launch.phase]
        barrier.phase[over] = -1
        machine.local[over, returned : returned + 4] = 0  # no error
        if over.size:
            machine.clocks.meet_all(np.unique(machine.block_of_lane[over]))
        passed = np.zeros(machine.lanes, np.bool_)
        passed[over] = True
        return passed

    return run
