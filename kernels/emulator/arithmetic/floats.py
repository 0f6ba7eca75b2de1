"""Arithmetic of float32 and float64, and of float16 and bfloat16.

In float32 and float64, add, sub, mul and fma, and div, rcp and sqrt with a rounding mode, round as IEEE 754
says. The `.approx` and `.full` forms are NumPy's float32 functions. These are more accurate than a GPU's, so
the results of approximate instructions differ from a GPU's in the last bits.

A bfloat16 is the upper half of a float32; arrays hold its bits. Results of 16 bits are computed in float32
and rounded again. The second rounding does no harm, since float32 has more than twice the bits of either,
plus two (Figueroa, When is double rounding innocuous?, 1995). A fused multiply-add goes through float64. For
float16 the sum is exact there, or so close to c that it rounds to c. For bfloat16 it is rounded to odd, which
keeps a later rounding to fewer bits right (Boldo and Melquiond, Emulation of a FMA and correctly rounded sums
using round-to-odd, 2008).

Source: PTX ISA manual, "Floating-Point Instructions" and "Half Precision Floating-Point Instructions".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..ptx.dtypes import Array
from .operations import Function, Operation, computes, uniform
from .rounding import MODES, flushing, fused_multiply_add, rounding

UPPER = np.uint64(0xFFFFFFFF00000000)
SHIFT = np.uint32(16)
ARITHMETIC: dict[str, tuple[int, Function]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "div": (2, np.divide),
    "rcp": (1, lambda x: x.dtype.type(1) / x),
    "sqrt": (1, np.sqrt),
    "neg": (1, np.negative),
    "abs": (1, np.absolute),
    "copysign": (2, lambda a, b: np.copysign(b, a)),  # b with the sign of a
}
APPROXIMATIONS = {name: ARITHMETIC[name] for name in ("div", "rcp", "sqrt")} | {
    "rsqrt": (1, lambda x: x.dtype.type(1) / np.sqrt(x)),
    "sin": (1, np.sin),
    "cos": (1, np.cos),
    "ex2": (1, np.exp2),
    "lg2": (1, np.log2),
    "tanh": (1, np.tanh),
}


@computes(rf"({'|'.join(ARITHMETIC)}|fma)(?:\.({'|'.join(MODES)}))?(\.ftz)?\.(f16|bf16|f32|f64)")
def arithmetic(name: str, mode: str, ftz: str, kind: str) -> Operation | None:
    """Sums, products, quotients, roots and signs: to nearest if they name no mode."""
    if (ftz and kind != "f32") or (kind.endswith("16") and mode not in ("", "rn")):
        return None
    if name == "fma":
        known = {"f16": _fma_16, "bf16": _fma_bf16}
        count, function = 3, known[kind] if kind in known else fused_multiply_add(kind)
    else:
        count, function = ARITHMETIC[name]
        function = through_32(kind, function) if kind.endswith("16") else function
    function = rounding(mode or "rn", function)
    return uniform(kind, count, flushing(function) if ftz else function)


@computes(rf"({'|'.join(APPROXIMATIONS)})\.approx(\.ftz)?\.(f32|f64)", r"(div)\.full(\.ftz)?\.(f32)")
def approximation(name: str, ftz: str, kind: str) -> Operation | None:
    """Instructions with `.approx`, and `div.full`."""
    count, function = APPROXIMATIONS[name]
    if kind == "f32":
        return uniform(kind, count, flushing(function) if ftz else function)
    if name == "rsqrt" or (name == "rcp" and ftz):
        return uniform(kind, count, _coarse(function) if ftz else function)
    return None


def _coarse(function: Function) -> Function:
    """Return `function` as `.approx.ftz.f64`: it uses the upper 32 bits, and flushes subnormals to zero."""

    def upper(x: Array) -> Any:
        normal = np.absolute(x) >= np.finfo(np.float64).smallest_normal
        return (x.view(np.uint64) & UPPER).view(np.float64) * normal

    return lambda x: upper(function(upper(x)))


def _chosen(choose: Function, combine: Function, a: Array, b: Array) -> Array:
    # Equal numbers have equal bits, except zeros of different sign; `combine` chooses the sign.
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    equal = combine(a.view(unsigned), b.view(unsigned)).view(a.dtype)
    return np.where(a == b, equal, choose(a, b))


# By name, and whether a NaN beats a number or loses to it. -0 is less than +0.
EXTREMES: dict[tuple[str, str], Function] = {
    ("min", ""): partial(_chosen, np.fmin, np.bitwise_or),
    ("max", ""): partial(_chosen, np.fmax, np.bitwise_and),
    ("min", ".NaN"): partial(_chosen, np.minimum, np.bitwise_or),
    ("max", ".NaN"): partial(_chosen, np.maximum, np.bitwise_and),
}


@computes(r"(min|max)(\.ftz)?(\.NaN)?\.(f32)", r"(min|max)()(\.NaN)?\.(f16|bf16)", r"(min|max)()()\.(f64)")
def extreme(name: str, ftz: str, nan: str, kind: str) -> Operation:
    """`min` and `max`. `.NaN` returns NaN for a NaN."""
    function = EXTREMES[name, nan]
    function = through_32(kind, function) if kind.endswith("16") else function
    return uniform(kind, 2, flushing(function) if ftz else function)


def widen(x: Array) -> Array:
    """Return bfloat16 (its bits) as float32."""
    return (x.astype(np.uint32) << SHIFT).view(np.float32)


def narrow(x: Array) -> Array:
    """Return float32 rounded to bfloat16, as bits; NaN becomes 0x7FFF."""
    upper = shorten(x.view(np.uint32), 16) >> SHIFT
    return np.where(np.isnan(x), np.uint16(0x7FFF), upper.astype(np.uint16))


def shorten(x: Array, count: int, away: bool = False) -> Array:
    """Return the bits of float32 numbers, rounded so that the lowest `count` of the significand are zeros.

    To nearest, ties to even or `away` from zero. A carry out of the significand correctly increments the
    exponent, up to infinity. Infinity stays; the caller handles NaN.
    """
    half, one = np.uint32(1 << (count - 1)), np.uint32(1)
    ties = half if away else half - one + ((x >> np.uint32(count)) & one)
    return (x + ties) & ~np.uint32((1 << count) - 1)


def _fma_16(a: Array, b: Array, c: Array) -> Array:
    exact: Array = a.astype(np.float64) * b + c
    return exact.astype(np.float16)


def _fma_bf16(a: Array, b: Array, c: Array) -> Array:
    x, y, z = (widen(operand).astype(np.float64) for operand in (a, b, c))
    down, up = (rounding(mode, lambda: (x * y + z).astype(np.float32))() for mode in ("rm", "rp"))
    # The exact sum lies between two neighbours. One of them ends in a 1: take that one.
    return narrow(np.where(down.view(np.uint32) & np.uint32(1), down, up))


def through_32(kind: str, function: Function) -> Function:
    """Return `function` of float32 as a function of f16 or bf16: widen operands, round the result."""
    if kind == "f16":
        return lambda *xs: function(*(x.astype(np.float32) for x in xs)).astype(np.float16)
    return lambda *xs: narrow(function(*map(widen, xs)))
