"""Bit fields: extract, insert, extend and mask them; and permute bytes.

Source: PTX ISA manual, "Integer Arithmetic Instructions" (bfe to bmsk) and "Data Movement and Conversion
Instructions: prmt".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.operation import Builder, Operation, resized
from ..ptx.dtypes import DTYPES, Array

BYTE = np.uint32(0xFF)
ONES = np.uint32(0xFFFFFFFF)


def _extract(opcode: tuple[str, ...]) -> Operation | None:
    """`bfe d, a, position, length`: extract a field of `length` bits, extended by its sign or zeros."""
    kind = opcode[-1]
    if len(opcode) != 2 or kind not in ("u32", "s32", "u64", "s64"):
        return None
    narrow, double = DTYPES[kind], DTYPES[resized(kind, 64)]

    def function(a: Array, position: Array, length: Array) -> Array:
        length = length & BYTE
        # Shift to the top of 64 bits and back. Shifts by 64 or more fill with the sign, as the instruction
        # does.
        above = (np.uint32(64) - np.minimum(length, np.uint32(64))).astype(double)
        field = a.astype(double) >> (position & BYTE).astype(double)
        extended: Array = (field << above) >> above
        return extended.astype(narrow)

    return Operation(kind, (kind, "u32", "u32"), function)


def _insert(opcode: tuple[str, ...]) -> Operation | None:
    """`bfi f, a, b, position, length`: b with a field of `length` bits replaced by a's lowest bits."""
    kind = opcode[-1]
    if len(opcode) != 2 or kind not in ("b32", "b64"):
        return None
    dtype = DTYPES[kind]

    def function(a: Array, b: Array, position: Array, length: Array) -> Any:
        shift = (position & BYTE).astype(dtype)
        field = ~(~dtype.type(0) << (length & BYTE).astype(dtype)) << shift
        return (b & ~field) | ((a << shift) & field)

    return Operation(kind, (kind, kind, "u32", "u32"), function)


def _extend(opcode: tuple[str, ...]) -> Operation | None:
    """`szext d, a, n`: the lowest n bits, extended by their sign or zeros."""
    if len(opcode) != 3 or opcode[1] not in ("clamp", "wrap") or opcode[2] not in ("s32", "u32"):
        return None
    kind, clamp, dtype = opcode[2], opcode[1] == "clamp", DTYPES[opcode[2]]

    def function(a: Array, n: Array) -> Any:
        kept = np.minimum(n, np.uint32(32)) if clamp else n & np.uint32(31)
        above = (np.uint32(32) - kept).astype(dtype)
        return np.where(kept == 0, dtype.type(0), (a << above) >> above)

    return Operation(kind, (kind, "u32"), function)


def _mask(opcode: tuple[str, ...]) -> Operation | None:
    """`bmsk d, position, width`: `width` ones from a position on, cut off at 32 bits."""
    if len(opcode) != 3 or opcode[1] not in ("clamp", "wrap") or opcode[2] != "b32":
        return None
    clamp = opcode[1] == "clamp"

    def function(position: Array, width: Array) -> Any:
        if not clamp:
            position, width = position & np.uint32(31), width & np.uint32(31)
        return ~(ONES << width) << position

    return Operation("b32", ("u32", "u32"), function)


# The source bytes (of 8) that each mode of `prmt` selects, for the 4 values of its control.
MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def _permute(opcode: tuple[str, ...]) -> Operation | None:
    """`prmt.b32{.mode} d, a, b, control`: select four of the eight bytes of b:a."""
    modes = opcode[2:]
    if opcode[1:2] != ("b32",) or len(modes) > 1 or not set(modes) <= MODES.keys():
        return None
    codes = (
        np.array([sum(byte << 4 * at for at, byte in enumerate(row)) for row in MODES[modes[0]]])
        if modes
        else None
    )

    def function(a: Array, b: Array, control: Array) -> Array:
        code = control if codes is None else codes.astype(np.uint32)[control & np.uint32(3)]
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros_like(a & b & control)
        for at in range(4):
            choice = code >> np.uint32(4 * at)
            byte = (both >> ((choice & np.uint32(7)) << np.uint32(3))).astype(np.uint32) & BYTE
            sign = (byte >> np.uint32(7)) * BYTE
            result = result | (np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * at))
        return result

    return Operation("b32", ("b32", "b32", "b32"), function)


BUILDERS: dict[str, list[Builder]] = {
    "bfe": [_extract],
    "bfi": [_insert],
    "szext": [_extend],
    "bmsk": [_mask],
    "prmt": [_permute],
}
