"""Look up what an instruction computes: `operation(("mad", "lo", "s32"))`.

This covers the instructions that compute in registers alone, without memory (see `atomics` for atomic
arithmetic), exchanges within a warp (`warp_operations`) and control flow.
"""

from __future__ import annotations

import functools

from ..base.operation import Builder, Operation
from . import bit_fields, bits, compare, convert, floats, half_precision, integers

# No two tables know the same opcode.
TABLES: tuple[dict[str, list[Builder]], ...] = tuple(
    module.BUILDERS for module in (integers, bit_fields, bits, compare, convert, floats, half_precision)
)


@functools.cache
def operation(opcode: tuple[str, ...], results: int = 1) -> Operation | None:
    """Return what an opcode, split at its dots, computes, or None; `results` is 2 for `setp.lt.s32 p|q`."""
    if len(opcode) < 2:
        return None
    if results == 2 and (found := compare.both_predicates(opcode)):
        return found
    for table in TABLES:
        for build in table.get(opcode[0], ()):
            if found := build(opcode):
                return found
    return None
