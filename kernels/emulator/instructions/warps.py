"""Shuffles, votes and matches of a warp, wired to registers.

The lanes that have arrived wait for all lanes that such an instruction names. It is a fault if one never
arrives, and if a lane uses the value of a lane that takes no part (`memory.undefined_values`).
"""

from __future__ import annotations

import numpy as np

from ..accesses.undefined_values import EXCHANGES, UndefinedValues
from ..arithmetic.warp_operations import LANES, WarpOperation, awaited, takes_part, warp_operation, word
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError


@unit(*EXCHANGES, order="pure", missed="warp diverged")
def exchange(batch: Batch) -> Run:
    """shfl.sync, vote.sync, match.sync: d or d|p, operands, the mask of members last."""
    found = warp_operation(batch.first.opcode)
    if found is None:
        raise EmulatorError(f"the emulator does not know the instruction {batch.first.name}")
    reads = [batch.source(1 + i, kind) for i, kind in enumerate(found.operands)]
    write, second = batch.target(0, found.result), batch.second_target(0)

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        active = np.ones(machine.lanes, np.bool_) if mask is None else mask
        operands = [_by_warp(machine, read(machine), len(batch)) for read in reads]
        lanes = active.reshape(-1, 32)
        missing = awaited(operands[-1], lanes)
        waits: Lanes = (missing & word(machine.alive.reshape(-1, 32)) != 0).any(axis=0).reshape(-1)
        if waits.any():
            mask = active & ~waits
            if not mask.any():
                return ~waits
        running = np.broadcast_to(lanes, operands[-1].shape) & ~waits.reshape(-1, 32)
        result, predicate, undefined = found.function(np.broadcast_to(lanes, running.shape), *operands)
        write(machine, _by_lane(machine, result, len(batch)), mask)
        if second is not None and predicate is not None:
            second(machine, _by_lane(machine, predicate, len(batch)), mask)
        if machine.has_undefined:
            _hand_on(machine, batch, found, lanes, running, operands)
        if (undefined := undefined & running).any():
            _undefined(machine, batch, operands[-1], running, undefined, missing != 0)
        return ~waits if waits.any() else None

    return run


def _undefined(
    machine: Machine, batch: Batch, members: Array, running: Array, undefined: Array, missing: Array
) -> None:
    """Mark lanes that take the value of a lane without a part; Fault for a lane that does not name itself."""
    if (strange := running & ~takes_part(LANES, members, running)).any():
        first = int(np.argmax(strange))
        machine.instruction = batch.instructions[first // machine.lanes]
        who = machine.thread_name(first % machine.lanes)
        machine.fault(
            "undefined lane", f"{who} runs {batch.first.name} with a mask of members that does not name it"
        )
    values = machine.state(UndefinedValues)
    for i, lanes in enumerate(undefined.reshape(len(batch), -1)):
        ended = lanes & missing[i].reshape(-1)
        for some, kind, why in (
            (ended, "warp diverged", "has ended, though its mask of members names it"),
            (lanes & ~ended, "undefined lane", "its mask of members does not name"),
        ):
            if some.any():
                text = f"{batch.first.name} took from a lane that {why}"
                values.mark(batch, i, some, kind, text)


def _hand_on(
    machine: Machine, batch: Batch, found: WarpOperation, active: Array, running: Array, operands: list[Array]
) -> None:
    """Hand marks of undefined values on through the exchange."""
    own = np.broadcast_to(np.arange(machine.lanes, dtype=np.uint32).reshape(-1, 32), running.shape)
    if batch.first.opcode[0] == "shfl":
        sources, _, _ = found.function(np.broadcast_to(active, running.shape), own, *operands[1:])
    else:  # every member depends on all; its own mark stands for them
        sources = own
    machine.state(UndefinedValues).exchanged(batch, sources.reshape(len(batch), -1), running[0].reshape(-1))


def _by_warp(machine: Machine, values: Array, count: int) -> Array:
    """Return values of lanes as (instructions, warps, 32)."""
    return np.broadcast_to(values, (count, machine.lanes)).reshape(count, machine.warps, 32)


def _by_lane(machine: Machine, values: Array, count: int) -> Array:
    return np.broadcast_to(values, (count, machine.warps, 32)).reshape(count, machine.lanes)
