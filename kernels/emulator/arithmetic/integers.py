"""Integer arithmetic: sums, products and their high halves, quotients, carries, dot products of bytes.

Numbers wrap, on a GPU as in NumPy. PTX does not define a division by zero; here its result is all ones, as in
the code that NVIDIA's assembler makes of a division.

Source: PTX ISA manual, "Integer Arithmetic Instructions" and "Extended-Precision Integer Arithmetic
Instructions".
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..base.operation import INTEGERS, Builder, Function, Operation, bits, pairwise, resized, uniform
from ..ptx.dtypes import DTYPES, Array

LOW_32 = np.uint64(0xFFFFFFFF)
HALF_64 = np.uint64(32)


def divide(a: Array, b: Array) -> Array:
    """Return a / b, rounded towards zero."""
    quotient: Array = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        quotient = quotient + (((a < 0) != (b < 0)) & (quotient * b != a))
    return np.where(b == 0, ~(b * 0), quotient)


def remainder(a: Array, b: Array) -> Array:
    """Return a - b * (a / b), which has the sign of a."""
    return np.where(b == 0, ~(b * 0), np.fmod(a, b))


def high(a: Array, b: Array) -> Array:
    """Return the upper half of the product."""
    size = 8 * a.dtype.itemsize
    if size == 64:
        return _high_64(a, b)
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}").type
    product: Array = np.multiply(a, b, dtype=wide) >> wide(size)
    return product.astype(a.dtype)


def _high_64(a: Array, b: Array) -> Array:
    x, y = a.view(np.uint64), b.view(np.uint64)
    x0, x1, y0, y1 = x & LOW_32, x >> HALF_64, y & LOW_32, y >> HALF_64
    low, middle, other = x0 * y0, x0 * y1, x1 * y0
    carried = (low >> HALF_64) + (middle & LOW_32) + (other & LOW_32)
    upper: Array = x1 * y1 + (middle >> HALF_64) + (other >> HALF_64) + (carried >> HALF_64)
    if a.dtype.kind == "i":
        # As unsigned, a negative number is 2**64 too large; that adds the other factor to the upper half.
        upper = upper.view(np.int64) - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)
    return upper


def saturated(exact: Function) -> Function:
    """Return `exact` of s32 operands, computed in 64 bits and clamped to 32."""
    limits = np.iinfo(np.int32)
    return lambda *xs: np.clip(
        exact(*(x.astype(np.int64) for x in xs)), np.int64(limits.min), np.int64(limits.max)
    ).astype(np.int32)


SIMPLE: dict[str, tuple[int, Function]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "div": (2, divide),
    "rem": (2, remainder),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "neg": (1, np.negative),
    "abs": (1, np.absolute),
    "sad": (3, lambda a, b, c: np.where(a < b, b - a, a - b) + c),  # |a - b| + c
}


def _simple(opcode: tuple[str, ...]) -> Operation | None:
    name, *flags, kind = opcode
    count, function = SIMPLE[name]
    if flags == ["relu"] and name in ("min", "max") and kind in ("s32", "s16x2"):
        plain = function

        def function(*xs: Array) -> Any:
            return np.maximum(plain(*xs), xs[0].dtype.type(0))
    elif flags == ["sat"] and name in ("add", "sub") and kind == "s32":
        return uniform(kind, count, saturated(function))
    elif flags:
        return None
    if kind in ("s16x2", "u16x2") and name in ("add", "min", "max"):
        return uniform("b32", count, pairwise(kind[:3], function))
    return uniform(kind, count, function) if kind in INTEGERS else None


def _low_24(kind: str) -> Function:
    """Return a function that extends the low 24 bits of a 32-bit number to 64 bits."""
    shift, double = DTYPES[kind].type(8), DTYPES[resized(kind, 64)]
    return lambda x: ((x << shift) >> shift).astype(double)


def _product(name: str, mode: str, kind: str) -> tuple[str, Function] | None:
    """Return the kind and the function of `mul.mode.kind` or `mul24.mode.kind`."""
    if name.endswith("24"):
        if kind not in ("s32", "u32") or mode not in ("lo", "hi"):
            return None
        low, narrow, skip = _low_24(kind), DTYPES[kind], 16 if mode == "hi" else 0
        return kind, lambda a, b: ((low(a) * low(b)) >> skip).astype(narrow)
    if kind not in INTEGERS:
        return None
    if mode == "wide" and kind[1:] != "64":
        double = resized(kind, 2 * bits(kind))
        return double, functools.partial(np.multiply, dtype=DTYPES[double])
    functions: dict[str, Function] = {"lo": np.multiply, "hi": high}
    return (kind, functions[mode]) if mode in functions else None


def _multiply(opcode: tuple[str, ...]) -> Operation | None:
    """`mul` and `mad`, and their 24-bit forms."""
    if len(opcode) < 3:
        return None
    name, mode, *flags, kind = opcode
    found = _product(name, mode, kind)
    if found is None:
        return None
    result, product = found
    if name.startswith("mul"):
        return None if flags else Operation(result, (kind, kind), product)
    operands = (kind, kind, result)
    if flags == ["sat"] and mode == "hi" and kind == "s32":
        add = saturated(np.add)
        return Operation(result, operands, lambda a, b, c: add(product(a, b), c))
    if flags:
        return None
    if mode == "lo" and name == "mad":
        return Operation(result, operands, lambda a, b, c: a * b + c)
    return Operation(result, operands, lambda a, b, c: product(a, b) + c)


def add_with_carry(a: Array, b: Array, carry: Any) -> tuple[Array, Array]:
    """Return (a + b + carry, carry out) of unsigned numbers; `carry` is a bool."""
    total = a + b
    result = total + carry
    return result, (total < a) | (result < total)


def subtract_with_borrow(a: Array, b: Array, borrow: Any) -> tuple[Array, Array]:
    """Return (a - b - borrow, borrow out) of unsigned numbers; `borrow` is a bool."""
    difference = a - b
    return difference - borrow, (a < b) | (difference < borrow)


def _extended(opcode: tuple[str, ...]) -> Operation | None:
    """`add.cc`, `addc`, `addc.cc`, `sub.cc`, `subc`, `subc.cc`, `mad.cc`, `madc` and `madc.cc`.

    The carry flag is a bool. If the instruction adds it, it is the function's last operand; if the
    instruction sets it, the function returns (result, carry).
    """
    name, *flags, kind = opcode
    reads, writes = name.endswith("c"), "cc" in flags
    if kind not in INTEGERS or kind[1:] == "16" or not (reads or writes) or flags.count("cc") > 1:
        return None
    name, flags = name.removesuffix("c"), [flag for flag in flags if flag != "cc"]
    combine: Function = subtract_with_borrow if name == "sub" else add_with_carry
    unsigned = DTYPES[f"u{bits(kind)}"]
    product: Function | None = None
    if name == "mad":
        found = _product("mul", flags.pop(0), kind) if flags else None
        if found is None or found[0] != kind:
            return None
        product = found[1]
    if flags:
        return None
    # The sum is unsigned; the product depends on the sign.
    operands = (kind, kind, f"u{bits(kind)}") if product else (f"u{bits(kind)}",) * 2

    def function(*xs: Array) -> Any:
        carry = xs[-1] if reads else np.False_
        terms = xs[: len(operands)]
        if product:
            terms = (product(*terms[:2]).view(unsigned), terms[2])
        result = combine(*terms, carry)
        return result if writes else result[0]

    return Operation(
        f"u{bits(kind)}",
        operands + ("pred",) * reads,
        function,
        1 + writes,
        reads_carry=reads,
        writes_carry=writes,
    )


def _parts(x: Array, kind: str, size: int) -> list[Array]:
    """Return the bytes (`size` 8) or halves (16) of x, lowest first, extended to int64."""
    narrow = DTYPES[resized(kind, size)]
    return [(x >> x.dtype.type(at)).astype(narrow).astype(np.int64) for at in range(0, 32, size)]


def _dot(opcode: tuple[str, ...]) -> Operation | None:
    """`dp4a.atype.btype` and `dp2a.mode.atype.btype`."""
    name, *flags, a_kind, b_kind = opcode
    if {a_kind, b_kind} - {"u32", "s32"} or flags not in ([[]] if name == "dp4a" else [["lo"], ["hi"]]):
        return None
    result = "u32" if a_kind == b_kind == "u32" else "s32"
    size, skip = (8, 0) if name == "dp4a" else (16, 2 * (flags == ["hi"]))

    def function(a: Array, b: Array, c: Array) -> Array:
        pairs = zip(_parts(a, a_kind, size), _parts(b, b_kind, 8)[skip:], strict=False)
        total: Array = sum((x * y for x, y in pairs), start=c.astype(np.int64))
        return total.astype(c.dtype)

    return Operation(result, (a_kind, b_kind, result), function)


BUILDERS: dict[str, list[Builder]] = {
    **{name: [_simple] for name in SIMPLE},
    "mul": [_multiply],
    "mul24": [_multiply],
    "mad": [_multiply, _extended],
    "mad24": [_multiply],
    "dp4a": [_dot],
    "dp2a": [_dot],
}
for _name in ("add", "sub", "addc", "subc", "madc"):
    BUILDERS.setdefault(_name, []).append(_extended)
