"""Shuffles, votes and matches: operations that the lanes of a warp compute together.

In the functions that compute, arrays are (..., 32), with the lanes on the last axis. `active` tells which
lanes run the instruction. `members` (its operand membermask) has a bit for each lane that takes part, in the
view of each lane: two halves of a warp may vote at once, each for itself. A lane's result is undefined if it
does not name itself, or if it reads a lane without a part. The functions return which results are undefined;
those hold some value.

The lanes that have arrived wait for all lanes that such an instruction names. It is a fault if one never
arrives, and if a lane uses an undefined value (`accesses.undefined_values`).

Source: PTX ISA manual, "Data Movement and Conversion Instructions: shfl.sync" and "Parallel Synchronization
and Communication Instructions: vote.sync, match.sync".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..accesses.undefined_values import EXCHANGES, UndefinedValues
from ..arithmetic.operations import Function, Operation
from ..base.addresses import active_lanes, awaited, word
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError

LANES = np.arange(32, dtype=np.uint32)
FIVE_BITS = np.uint32(31)

# (result, predicate or None, lanes that read what is undefined)
LaneExchange: TypeAlias = tuple[Array, "Array | None", Array]


def takes_part(lanes: Array, members: Array, active: Array) -> Array:
    """Return (..., 32): whether lane number `lanes` is active and a member."""
    return (((members & word(active)) >> lanes) & np.uint32(1)).astype(np.bool_)


def shuffle(mode: str, active: Array, value: Array, b: Array, c: Array, members: Array) -> LaneExchange:
    """Return `value` of another lane: `shfl.sync.mode.b32 d|p, value, b, c, members`.

    `b` is that lane, or its distance. `c` holds the last readable lane (the first for "up") and, from bit 8
    on, the bits of a lane's number that name its segment. The predicate tells whether the lane lies in this
    range; if not, the result is the lane's own value.
    """
    offset, segment = b & FIVE_BITS, (c >> np.uint32(8)) & FIVE_BITS
    first = LANES & segment
    limit = first | (c & FIVE_BITS & ~segment)
    if mode == "up":
        source = LANES - offset  # below 0 it wraps, so that it is compared as a signed number
        in_range = source.astype(np.int32) >= limit.astype(np.int32)
    else:
        source = {"down": LANES + offset, "bfly": LANES ^ offset, "idx": first | (offset & ~segment)}[mode]
        in_range = source <= limit
    shape = np.broadcast_shapes(active.shape, value.shape, in_range.shape)
    source = np.broadcast_to(np.where(in_range, source, LANES), shape)
    result = np.take_along_axis(np.broadcast_to(value, shape), source.astype(np.intp), axis=-1)
    undefined = active & ~(takes_part(source, members, active) & takes_part(LANES, members, active))
    return result, np.broadcast_to(in_range, shape), undefined


def vote(mode: str, active: Array, flag: Array, members: Array) -> LaneExchange:
    """Return all, any or uni (all or none) of the members' flags, or ballot: a bit for each."""
    present = members & word(active)
    true = word(np.broadcast_to(flag, active.shape)) & present
    results: dict[str, Callable[[], Array]] = {
        "all": lambda: true == present,
        "any": lambda: true != 0,
        "uni": lambda: (true == 0) | (true == present),
        "ballot": lambda: true,
    }
    return results[mode](), None, active & ~takes_part(LANES, members, active)


def match(mode: str, active: Array, value: Array, members: Array) -> LaneExchange:
    """Return the bits of members with this lane's value; in mode "all" all or none: the predicate."""
    present = members & word(active)
    value = np.broadcast_to(value, active.shape)
    same = word(value[..., :, None] == value[..., None, :])[..., 0] & present
    undefined = active & ~takes_part(LANES, members, active)
    if mode == "any":
        return same, None, undefined
    agree = same == present
    return np.where(agree, present, np.uint32(0)), agree, undefined


@functools.cache
def warp_operation(opcode: tuple[str, ...]) -> Operation | None:
    """Return what the instruction computes, or None, as for forms without `.sync`: they ended with sm_70.

    The function takes `active` before the operands, of which the mask of members is the last, and returns a
    LaneExchange. The kind of a second destination, `d|p`, is "pred".
    """
    partial: Function = functools.partial
    match opcode:
        case ("shfl", "sync", "up" | "down" | "bfly" | "idx" as mode, "b32"):
            return Operation("b32", ("b32", "u32", "u32", "u32"), partial(shuffle, mode))
        case ("vote", "sync", "all" | "any" | "uni" as mode, "pred"):
            return Operation("pred", ("pred", "u32"), partial(vote, mode))
        case ("vote", "sync", "ballot", "b32"):
            return Operation("b32", ("pred", "u32"), partial(vote, "ballot"))
        case ("match", "any" | "all" as mode, "sync", "b32" | "b64" as kind):
            return Operation("b32", (kind, "u32"), partial(match, mode))
    return None


@unit(*EXCHANGES, order="pure", missed="warp diverged")
def exchange(batch: Batch) -> Run:
    """shfl.sync, vote.sync, match.sync: d or d|p, operands, the mask of members last."""
    found = warp_operation(batch.first.opcode)
    if found is None:
        raise EmulatorError(f"the emulator does not know the instruction {batch.first.name}")
    reads = [batch.source(1 + i, kind) for i, kind in enumerate(found.operands)]
    write, second = batch.target(0, found.result), batch.second_target(0)

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        active = active_lanes(machine, mask)
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
    machine: Machine, batch: Batch, found: Operation, active: Array, running: Array, operands: list[Array]
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
