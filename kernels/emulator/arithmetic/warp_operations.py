"""Operations that the lanes of a warp compute together: shuffles, votes and matches.

Arrays are (..., 32), with the lanes on the last axis. `active` tells which lanes run the instruction.
`members` (its operand membermask) has a bit for each lane that takes part, in the view of each lane: two
halves of a warp may vote at once, each for itself. A lane's result is undefined if it does not name itself,
or if it reads a lane without a part. The functions return which results are undefined; those hold some value.

Source: PTX ISA manual, "Data Movement and Conversion Instructions: shfl.sync" and "Parallel Synchronization
and Communication Instructions: vote.sync, match.sync".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..ptx.dtypes import Array
from .operations import Function

LANES = np.arange(32, dtype=np.uint32)
FIVE_BITS = np.uint32(31)

# (result, predicate or None, lanes that read what is undefined)
LaneExchange: TypeAlias = tuple[Array, "Array | None", Array]


@dataclass(frozen=True, slots=True)
class WarpOperation:
    """Compute an instruction from the operands of all lanes of a warp."""

    result: str  # kind of the destination; that of the second, `d|p`, is "pred"
    operands: tuple[str, ...]  # kinds of the source operands, the mask of members last
    function: Callable[..., LaneExchange]  # takes `active` (..., 32) and an array (..., 32) for each operand


def word(flags: Array) -> Array:
    """Return flags (..., 32) as the bits of one uint32 for each warp, (..., 1)."""
    packed = np.packbits(flags, axis=-1, bitorder="little")
    return packed.view(np.dtype("<u4"))


def awaited(members: Array, active: Array) -> Array:
    """Return (..., 32): for each active lane, a bit for each lane that it names and that is not active.

    A `.sync` instruction waits for those of them that have not ended.
    """
    return np.where(active, members & ~word(active), np.uint32(0))


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
def warp_operation(opcode: tuple[str, ...]) -> WarpOperation | None:
    """Return what the instruction computes, or None, as for forms without `.sync`: they ended with sm_70."""
    partial: Function = functools.partial
    match opcode:
        case ("shfl", "sync", "up" | "down" | "bfly" | "idx" as mode, "b32"):
            return WarpOperation("b32", ("b32", "u32", "u32", "u32"), partial(shuffle, mode))
        case ("vote", "sync", "all" | "any" | "uni" as mode, "pred"):
            return WarpOperation("pred", ("pred", "u32"), partial(vote, mode))
        case ("vote", "sync", "ballot", "b32"):
            return WarpOperation("b32", ("pred", "u32"), partial(vote, "ballot"))
        case ("match", "any" | "all" as mode, "sync", "b32" | "b64" as kind):
            return WarpOperation("b32", (kind, "u32"), partial(match, mode))
    return None
