"""Integer arithmetic: sums, products and their high halves, quotients, carries.

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
from .operations import INTEGER, Function, Operation, bits, computes, resized, uniform

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


def _product(mode: str, kind: str) -> tuple[str, Function]:
    """Return the kind and the function of `mul.mode.kind`."""
    if mode == "wide":
        double = resized(kind, 2 * bits(kind))
        return double, functools.partial(np.multiply, dtype=DTYPES[double])
    return kind, np.multiply if mode == "lo" else high


@computes(rf"(mul|mad)\.(lo|hi)\.({INTEGER})", r"(mul|mad)\.(wide)\.([us](?:16|32))")
def multiply(name: str, mode: str, kind: str) -> Operation:
    """`mul` and `mad`."""
    result, product = _product(mode, kind)
    if name == "mul":
        return Operation(result, (kind, kind), product)
    return Operation(result, (kind, kind, result), lambda a, b, c: product(a, b) + c)


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
    product = _product(mode, kind)[1] if mode else None
    operands = (kind, kind, unsigned) if product else (unsigned, unsigned)

    def function(*xs: Array) -> Any:
        carry = xs[-1] if reads else np.False_
        terms = xs[: len(operands)]
        if product:
            terms = (product(*terms[:2]).view(DTYPES[unsigned]), terms[2])
        result = combine(*terms, carry)
        return result if writes else result[0]

    flag = ("pred",) if reads else ()
    return Operation(unsigned, operands + flag, function, bool(reads), bool(writes))
