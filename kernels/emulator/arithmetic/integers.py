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

from ..ptx.dtypes import DTYPES, Array
from .operations import INTEGER, Function, Operation, bits, computes, pairwise, resized, uniform

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


@computes(rf"({'|'.join(SIMPLE)})\.({INTEGER})")
def simple(name: str, kind: str) -> Operation:
    """Sums, quotients, extremes and the like."""
    return uniform(kind, *SIMPLE[name])


@computes(r"(add|min|max)\.([us]16)x2")
def of_pairs(name: str, kind: str) -> Operation:
    """`add`, `min` and `max` of packed pairs."""
    return uniform("b32", 2, pairwise(kind, SIMPLE[name][1]))


@computes(r"(min|max)\.relu\.(s32)()", r"(min|max)\.relu\.(s16)(x2)")
def at_least_zero(name: str, kind: str, paired: str) -> Operation:
    """`min` and `max` with `.relu`: a negative result becomes 0."""
    extreme = SIMPLE[name][1]

    def function(a: Array, b: Array) -> Any:
        return np.maximum(extreme(a, b), a.dtype.type(0))

    return uniform("b32", 2, pairwise(kind, function)) if paired else uniform(kind, 2, function)


def saturated(exact: Function) -> Function:
    """Return `exact` of s32 operands, computed in 64 bits and clamped to 32."""
    limits = np.iinfo(np.int32)
    return lambda *xs: np.clip(
        exact(*(x.astype(np.int64) for x in xs)), np.int64(limits.min), np.int64(limits.max)
    ).astype(np.int32)


@computes(r"(add|sub)\.sat\.s32")
def saturating(name: str) -> Operation:
    """`add` and `sub` with `.sat`."""
    return uniform("s32", 2, saturated(SIMPLE[name][1]))


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


def _product(name: str, mode: str, kind: str) -> tuple[str, Function]:
    """Return the kind and the function of `mul.mode.kind` or `mul24.mode.kind`."""
    if name.endswith("24"):
        shift, double, narrow = DTYPES[kind].type(8), DTYPES[resized(kind, 64)], DTYPES[kind]
        skip = 16 if mode == "hi" else 0

        def low(x: Array) -> Array:
            """Return the low 24 bits of 32-bit numbers, extended to 64 bits."""
            return ((x << shift) >> shift).astype(double)

        return kind, lambda a, b: ((low(a) * low(b)) >> skip).astype(narrow)
    if mode == "wide":
        double_kind = resized(kind, 2 * bits(kind))
        return double_kind, functools.partial(np.multiply, dtype=DTYPES[double_kind])
    return kind, np.multiply if mode == "lo" else high


@computes(
    rf"(mul|mad)\.(lo|hi)\.({INTEGER})",
    r"(mul|mad)\.(wide)\.([us](?:16|32))",
    r"(mul24|mad24)\.(lo|hi)\.([us]32)",
)
def multiply(name: str, mode: str, kind: str) -> Operation:
    """`mul` and `mad`, and their 24-bit forms."""
    result, product = _product(name, mode, kind)
    if name.startswith("mul"):
        return Operation(result, (kind, kind), product)
    return Operation(result, (kind, kind, result), lambda a, b, c: product(a, b) + c)


@computes(r"(mad|mad24)\.hi\.sat\.s32")
def multiply_saturating(name: str) -> Operation:
    """`mad.hi` and `mad24.hi` with `.sat`."""
    (_, product), add = _product(name, "hi", "s32"), saturated(np.add)
    return uniform("s32", 3, lambda a, b, c: add(product(a, b), c))


def add_with_carry(a: Array, b: Array, carry: Any) -> tuple[Array, Array]:
    """Return (a + b + carry, carry out) of unsigned numbers; `carry` is a bool."""
    total = a + b
    result = total + carry
    return result, (total < a) | (result < total)


def subtract_with_borrow(a: Array, b: Array, borrow: Any) -> tuple[Array, Array]:
    """Return (a - b - borrow, borrow out) of unsigned numbers; `borrow` is a bool."""
    difference = a - b
    return difference - borrow, (a < b) | (difference < borrow)


@computes(
    r"(add|sub)(c)()(\.cc)?\.[us](32|64)",
    r"(add|sub)()()(\.cc)\.[us](32|64)",
    r"(mad)(c)\.(lo|hi)(\.cc)?\.([us](?:32|64))",
    r"(mad)()\.(lo|hi)(\.cc)\.([us](?:32|64))",
)
def extended(name: str, reads: str, mode: str, writes: str, kind: str) -> Operation:
    """`add.cc`, `addc`, `addc.cc`, `sub.cc`, `subc`, `subc.cc`, `mad.cc`, `madc` and `madc.cc`.

    The carry flag is a bool. If the instruction adds it, it is the function's last operand; if the
    instruction sets it, the function returns (result, carry).
    """
    unsigned = f"u{kind[-2:]}"
    combine: Function = subtract_with_borrow if name == "sub" else add_with_carry
    # The sum is unsigned; the product depends on the sign.
    product = _product("mul", mode, kind)[1] if mode else None
    operands = (kind, kind, unsigned) if product else (unsigned, unsigned)

    def function(*xs: Array) -> Any:
        carry = xs[-1] if reads else np.False_
        terms = xs[: len(operands)]
        if product:
            terms = (product(*terms[:2]).view(DTYPES[unsigned]), terms[2])
        result = combine(*terms, carry)
        return result if writes else result[0]

    flag = ("pred",) if reads else ()
    return Operation(unsigned, operands + flag, function, 1 + bool(writes), bool(reads), bool(writes))


def _parts(x: Array, kind: str, size: int) -> list[Array]:
    """Return the bytes (`size` 8) or halves (16) of x, lowest first, extended to int64."""
    narrow = DTYPES[resized(kind, size)]
    return [(x >> x.dtype.type(at)).astype(narrow).astype(np.int64) for at in range(0, 32, size)]


@computes(r"dp(4)a()\.([us]32)\.([us]32)", r"dp(2)a\.(lo|hi)\.([us]32)\.([us]32)")
def dot(terms: str, mode: str, a_kind: str, b_kind: str) -> Operation:
    """`dp4a.atype.btype` and `dp2a.mode.atype.btype`."""
    result = "u32" if a_kind == b_kind == "u32" else "s32"
    size, skip = 32 // int(terms), 2 if mode == "hi" else 0

    def function(a: Array, b: Array, c: Array) -> Array:
        pairs = zip(_parts(a, a_kind, size), _parts(b, b_kind, 8)[skip:], strict=False)
        total: Array = sum((x * y for x, y in pairs), start=c.astype(np.int64))
        return total.astype(c.dtype)

    return Operation(result, (a_kind, b_kind, result), function)
