"""Logic, shifts, counting and finding bits, bit fields, byte permutation.

Source: PTX ISA manual, "Logic and Shift Instructions", "Integer Arithmetic Instructions" (popc to bfi), and
"Data Movement and Conversion Instructions: prmt".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ptx.dtypes import DTYPES, Array
from .operations import Function, Operation, bits, computes, resized, uniform

BYTE = np.uint32(0xFF)
ONES = np.uint32(0xFFFFFFFF)
LOGIC: dict[str, tuple[int, Function]] = {
    "and": (2, np.bitwise_and),
    "or": (2, np.bitwise_or),
    "xor": (2, np.bitwise_xor),
    "not": (1, np.bitwise_not),
}


@computes(r"(and|or|xor|not)\.(pred|b16|b32|b64)")
def logic(name: str, kind: str) -> Operation:
    """Logic, bit by bit, or of predicates."""
    return uniform(kind, *LOGIC[name])


@computes(r"(shl|shr)\.([bus](?:16|32|64))")
def shift(name: str, kind: str) -> Operation:
    """`shl` and `shr`. As in NumPy, a count of the width or more shifts out all bits."""
    size = bits(kind)
    function: Function = np.left_shift if name == "shl" else np.right_shift
    if size == 16:
        narrow, most = DTYPES[kind], np.uint32(16)
        return Operation(kind, (kind, "u32"), lambda x, n: function(x, np.minimum(n, most).astype(narrow)))
    # A count of 2**31 or more, read as a negative number, also shifts out all bits.
    count = "u32" if size == 64 and kind[0] != "s" else resized(kind, 32)
    return Operation(kind, (kind, count), function)


@computes(r"shf\.(l|r)\.(clamp|wrap)\.b32")
def funnel(direction: str, mode: str) -> Operation:
    """`shf.l.wrap.b32 d, a, b, c`: shift the 64 bits b:a by c; keep the upper half (l) or the lower (r)."""
    half = np.uint64(32)

    def function(a: Array, b: Array, c: Array) -> Array:
        count = np.minimum(c, np.uint32(32)) if mode == "clamp" else c & np.uint32(31)
        both = (b.astype(np.uint64) << half) | a
        shifted: Array = (both << count) >> half if direction == "l" else both >> count
        return shifted.astype(np.uint32)

    return Operation("b32", ("b32", "b32", "u32"), function)


def count_ones(x: Array) -> Array:
    """Return how many bits of x (unsigned) are 1, as uint32."""
    ones: Array = np.unpackbits(x[..., None].view(np.uint8), axis=-1).sum(axis=-1, dtype=np.uint32)
    return ones


def bit_length(x: Array) -> Array:
    """Return the position of the highest 1 of x (unsigned), counted from 1, as uint32; 0 for x = 0."""

    def of_32(x: Array) -> Array:
        return np.frexp(x.astype(np.float64))[1].astype(np.uint32)

    if x.dtype.itemsize < 8:
        return of_32(x)
    upper = (x >> np.uint64(32)).astype(np.uint32)
    return np.where(upper != 0, of_32(upper) + np.uint32(32), of_32(x.astype(np.uint32)))


def reverse(x: Array) -> Array:
    """Return x (unsigned) with its bits in reverse order."""
    ones = np.unpackbits(x.byteswap()[..., None].view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(ones, axis=-1).view(x.dtype)[..., 0]


@computes(r"(popc|clz|brev)\.(b32|b64)")
def count(name: str, kind: str) -> Operation:
    """Count the ones, or the zeros before the highest one; or reverse the bits."""
    size = np.uint32(bits(kind))
    if name == "brev":
        return uniform(kind, 1, reverse)
    return Operation("u32", (kind,), count_ones if name == "popc" else lambda x: size - bit_length(x))


@computes(r"bfind(\.shiftamt)?\.([us](?:32|64))")
def find(shift: str, kind: str) -> Operation:
    """`bfind{.shiftamt}`: the highest bit that differs from the sign, or all ones if none does."""
    unsigned, top = DTYPES[f"u{bits(kind)}"], np.uint32(bits(kind) - 1)

    def function(x: Array) -> Array:
        if kind[0] == "s":
            x = (x ^ (x >> x.dtype.type(top))).view(unsigned)
        length = bit_length(x)
        position: Array = length - np.uint32(1)
        return np.where(length == 0, ONES, top - position) if shift else position

    return Operation("u32", (kind,), function)


@computes(r"bfe\.([us](?:32|64))")
def extract(kind: str) -> Operation:
    """`bfe d, a, position, length`: extract a field of `length` bits, extended by its sign or zeros."""
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


@computes(r"bfi\.(b32|b64)")
def insert(kind: str) -> Operation:
    """`bfi f, a, b, position, length`: b with a field of `length` bits replaced by a's lowest bits."""
    dtype = DTYPES[kind]

    def function(a: Array, b: Array, position: Array, length: Array) -> Any:
        shift = (position & BYTE).astype(dtype)
        field = ~(~dtype.type(0) << (length & BYTE).astype(dtype)) << shift
        return (b & ~field) | ((a << shift) & field)

    return Operation(kind, (kind, kind, "u32", "u32"), function)


@computes(r"prmt\.b32")
def permute() -> Operation:
    """`prmt.b32 d, a, b, control`: select four of the eight bytes of b:a."""

    def function(a: Array, b: Array, control: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros_like(a & b & control)
        for at in range(4):
            choice = control >> np.uint32(4 * at)
            byte = (both >> ((choice & np.uint32(7)) << np.uint32(3))).astype(np.uint32) & BYTE
            sign = (byte >> np.uint32(7)) * BYTE
            result = result | (np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * at))
        return result

    return Operation("b32", ("b32", "b32", "b32"), function)
