"""Every instruction that computes in registers alone: `operation(("mad", "lo", "s32"))` says what it does.

Not among them are instructions that touch memory (for atomic ones, `atomics.py` has the arithmetic), exchange
values between the lanes of a warp (`warp_operations.py`) or steer the program.
"""

from __future__ import annotations

import functools

from ..base.ptx_types import Builder, Operation, pack, unpack
from . import bit_fields, bits, compare, convert, floats, half_precision, integers

__all__ = ["Operation", "operation", "pack", "unpack"]

# The first that knows an opcode is right: no two know the same.
TABLES: tuple[dict[str, list[Builder]], ...] = tuple(
    module.BUILDERS for module in (integers, bit_fields, bits, compare, convert, floats, half_precision)
)


@functools.cache
def operation(opcode: tuple[str, ...], results: int = 1) -> Operation | None:
    """Return what the instruction computes, or None where it is unknown here.

    `opcode` is the instruction's name split at its dots. `results` is 2 where the text names two destinations
    (`setp.lt.s32 %p1|%p2, ...`): only `setp` has an opcode that is the same for one and for two.
    """
    if len(opcode) < 2:
        return None
    if results == 2 and (found := compare.both_predicates(opcode)):
        return found
    for table in TABLES:
        for build in table.get(opcode[0], ()):
            if found := build(opcode):
                return found
    return None
