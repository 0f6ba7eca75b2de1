"""Logic, shifts, counting and finding bits (PTX ISA, "Logic and Shift Instructions", popc to brev)."""

from __future__ import annotations

import numpy as np

from ..base.operation import BITS, INTEGERS, Builder, Function, Operation, bits, resized, uniform
from ..ptx.dtypes import DTYPES, Array

ONES = np.uint32(0xFFFFFFFF)
# Masks that swap neighbouring bits, pairs, ... of a 64-bit number, or add them up.
MASKS = {
    width: np.uint64(sum((1 << width) - 1 << at for at in range(0, 64, 2 * width)))
    for width in (1, 2, 4, 8, 16, 32)
}


def _logic(opcode: tuple[str, ...]) -> Operation | None:
    functions: dict[str, tuple[int, Function]] = {
        "and": (2, np.bitwise_and),
        "or": (2, np.bitwise_or),
        "xor": (2, np.bitwise_xor),
        "not": (1, np.bitwise_not),
        "cnot": (1, lambda x: (x == 0).astype(x.dtype)),
    }
    name, kind = opcode[0], opcode[-1]
    if len(opcode) != 2 or kind not in BITS or opcode == ("cnot", "pred"):
        return None
    return uniform(kind, *functions[name])


def _lop3(opcode: tuple[str, ...]) -> Operation | None:
    """`lop3.b32 d, a, b, c, table` and `lop3.and.b32 d|p, a, b, c, table, q`."""
    *flags, kind = opcode[1:]
    if kind != "b32" or flags not in ([], ["and"], ["or"]):
        return None

    def lookup(a: Array, b: Array, c: Array, table: Array) -> Array:
        result = np.zeros_like(a & b & c & table)
        for row in range(8):
            chosen = -((table >> np.uint32(row)) & np.uint32(1))
            result = result | (
                (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c) & chosen
            )
        return result

    if not flags:
        return Operation("b32", ("b32",) * 4, lookup)
    combine = np.logical_and if flags == ["and"] else np.logical_or

    def function(a: Array, b: Array, c: Array, table: Array, q: Array) -> tuple[Array, Array]:
        d = lookup(a, b, c, table)
        return d, combine(d != 0, q)

    return Operation("b32", ("b32",) * 4 + ("pred",), function, results=2)


def _shift(opcode: tuple[str, ...]) -> Operation | None:
    """`shl` and `shr`. As in NumPy, a count of the width or more shifts out all bits."""
    name, kind = opcode[0], opcode[-1]
    if len(opcode) != 2 or kind not in (*BITS[1:], *INTEGERS):
        return None
    size = bits(kind)
    function: Function = np.left_shift if name == "shl" else np.right_shift
    if size == 16:
        narrow, most = DTYPES[kind], np.uint32(16)
        return Operation(kind, (kind, "u32"), lambda x, n: function(x, np.minimum(n, most).astype(narrow)))
    # A count of 2**31 or more, read as a negative number, also shifts out all bits.
    count = "u32" if size == 64 and kind[0] != "s" else resized(kind, 32)
    return Operation(kind, (kind, count), function)


def _funnel(opcode: tuple[str, ...]) -> Operation | None:
    """`shf.l.wrap.b32 d, a, b, c`: shift the 64 bits b:a by c; keep the upper half (l) or the lower (r)."""
    match opcode[1:]:
        case ("l" | "r" as direction, "clamp" | "wrap" as mode, "b32"):
            clamp, left, half = mode == "clamp", direction == "l", np.uint64(32)
        case _:
            return None

    def function(a: Array, b: Array, c: Array) -> Array:
        count = np.minimum(c, np.uint32(32)) if clamp else c & np.uint32(31)
        both = (b.astype(np.uint64) << half) | a
        shifted: Array = (both << count) >> half if left else both >> count
        return shifted.astype(np.uint32)

    return Operation("b32", ("b32", "b32", "u32"), function)


def count_ones(x: Array) -> Array:
    """Return how many bits of x (unsigned) are 1, as uint32."""
    total = x.astype(np.uint64)
    for width in (1, 2, 4, 8, 16, 32):
        total = (total & MASKS[width]) + ((total >> np.uint64(width)) & MASKS[width])
    return total.astype(np.uint32)


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
    size = 8 * x.dtype.itemsize
    y = x.astype(np.uint64)
    for width in (1, 2, 4, 8, 16, 32):
        y = ((y & MASKS[width]) << np.uint64(width)) | ((y >> np.uint64(width)) & MASKS[width])
    return (y >> np.uint64(64 - size)).astype(x.dtype)


def _count(opcode: tuple[str, ...]) -> Operation | None:
    """`popc`, `clz` and `brev`."""
    name, kind = opcode[0], opcode[-1]
    if len(opcode) != 2 or kind not in ("b32", "b64"):
        return None
    size = np.uint32(bits(kind))
    if name == "brev":
        return uniform(kind, 1, reverse)
    return Operation("u32", (kind,), count_ones if name == "popc" else lambda x: size - bit_length(x))


def _find(opcode: tuple[str, ...]) -> Operation | None:
    """`bfind{.shiftamt}`: the highest bit that differs from the sign, or all ones if none does."""
    *flags, kind = opcode[1:]
    if kind not in ("u32", "s32", "u64", "s64") or flags not in ([], ["shiftamt"]):
        return None
    unsigned, top = DTYPES[f"u{bits(kind)}"], np.uint32(bits(kind) - 1)

    def function(x: Array) -> Array:
        if kind[0] == "s":
            x = (x ^ (x >> x.dtype.type(top))).view(unsigned)
        length = bit_length(x)
        position: Array = length - np.uint32(1)
        return np.where(length == 0, ONES, top - position) if flags else position

    return Operation("u32", (kind,), function)


BUILDERS: dict[str, list[Builder]] = {
    **{name: [_logic] for name in ("and", "or", "xor", "not", "cnot")},
    "lop3": [_lop3],
    "shl": [_shift],
    "shr": [_shift],
    "shf": [_funnel],
    **{name: [_count] for name in ("popc", "clz", "brev")},
    "bfind": [_find],
}
