"""Shuffles, votes, matches and reductions of a warp, wired to registers.

A lane that such an instruction names must run it too. Lanes that took another branch would be waited for on a
GPU, or hang it; here that is a fault, as is the use of a value from a lane that takes no part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .batch import Batch
from .fault import EmulatorError
from .operands import Pair
from .units import Array, Mask, Run, unit
from .warp_operations import awaited, warp_operation

if TYPE_CHECKING:
    from .machine import Machine


@unit("shfl", "vote", "match", "redux", order="pure")
def exchange(batch: Batch) -> Run:
    """shfl.sync, vote.sync, match.sync, redux.sync: d or d|p, operands, the mask of members last."""
    found = warp_operation(batch.first.opcode)
    if found is None:
        raise EmulatorError(f"the emulator does not know the instruction {batch.first.name}")
    reads = [batch.source(1 + i, kind) for i, kind in enumerate(found.operands)]
    pairs = [operand for operand in batch.operands(0) if isinstance(operand, Pair)]
    write = batch.target(0, found.result)
    second = batch.writer([pair.second for pair in pairs], "pred") if pairs else None

    def run(machine: Machine, mask: Mask) -> None:
        active = np.ones(machine.lanes, np.bool_) if mask is None else mask
        operands = [_by_warp(machine, read(machine), len(batch)) for read in reads]
        lanes = np.broadcast_to(active.reshape(-1, 32), (len(batch), machine.warps, 32))
        missing = awaited(operands[-1], lanes).any(axis=(0, 2))
        if missing.any():
            machine.fault(
                "warp diverged",
                f"{batch.first.name} names lanes of its warp that have ended or went another way",
                lanes=active & np.repeat(missing, 32),
            )
        result, predicate, undefined = found.function(lanes, *operands)
        if undefined.any():
            machine.fault(
                "undefined lane",
                f"{batch.first.name} takes the value of a lane that its mask of members does not name",
                lanes=undefined.any(axis=0).reshape(-1),
            )
        write(machine, _by_lane(machine, result, len(batch)), mask)
        if second is not None and predicate is not None:
            second(machine, _by_lane(machine, predicate, len(batch)), mask)

    return run


def _by_warp(machine: Machine, values: Array, count: int) -> Array:
    """Return values of lanes as (instructions, warps, 32)."""
    return np.broadcast_to(values, (count, machine.lanes)).reshape(count, machine.warps, 32)


def _by_lane(machine: Machine, values: Array, count: int) -> Array:
    return np.broadcast_to(values, (count, machine.warps, 32)).reshape(count, machine.lanes)
