"""Arithmetic of float16 and bfloat16, alone and packed in pairs (f16x2, bf16x2).

A bfloat16 is the upper half of a float32; arrays hold its bits. Sums, products, quotients and roots are
computed in float32 and rounded again. The second rounding does no harm, since float32 has more than twice
the bits of either, plus two (Figueroa, When is double rounding innocuous?, 1995). A fused multiply-add goes
through float64. For float16 the sum is exact there, or so close to c that it rounds to c. For bfloat16 it is
rounded to odd, which keeps a later rounding to fewer bits right (Boldo and Melquiond, Emulation of a FMA and
correctly rounded sums using round-to-odd, 2008).

Source: PTX ISA manual, "Half Precision Floating-Point Instructions".
"""

from __future__ import annotations

import numpy as np

from ..ptx.dtypes import Array
from .floats import EXTREMES
from .operations import Function, Operation, computes, pairwise, uniform, words
from .rounding import saturating, two_sum

SHIFT = np.uint32(16)
STICKY_64 = np.int64(1)


def widen(x: Array) -> Array:
    """Return bfloat16 (its bits) as float32."""
    return (x.astype(np.uint32) << SHIFT).view(np.float32)


def narrow(x: Array, mode: str = "rn") -> Array:
    """Return float32 rounded to bfloat16, as bits; NaN becomes 0x7FFF."""
    upper = shorten(x.view(np.uint32), 16, mode)
    return np.where(np.isnan(x), np.uint16(0x7FFF), (upper >> SHIFT).astype(np.uint16))


def shorten(x: Array, count: int, mode: str) -> Array:
    """Return the bits of float32 numbers, rounded so that the lowest `count` of the significand are zeros.

    A carry out of the significand correctly increments the exponent, up to infinity. `mode` may also be
    "rna": to nearest, ties away from zero. Infinity stays; the caller handles NaN.
    """
    one, mask = np.uint32(1 << count), np.uint32((1 << count) - 1)
    half = np.uint32(1 << (count - 1))
    negative = x >> np.uint32(31) != 0
    rounding = {
        "rn": lambda: half - np.uint32(1) + ((x >> np.uint32(count)) & np.uint32(1)),
        "rna": lambda: half,
        "rz": lambda: np.uint32(0),
        "rm": lambda: negative * mask,
        "rp": lambda: ~negative * mask,
    }[mode]()
    return (x + rounding) & ~(one - np.uint32(1))


def to_odd(s: Array, error: Array) -> Array:
    """Return s + error (float64, from `two_sum`) rounded to odd: inexact numbers end in a 1."""
    even = (s.view(np.int64) & STICKY_64) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even & np.isfinite(s), np.nextafter(s, towards), s)


def to_odd_32(x: Array) -> Array:
    """Return float64 rounded to odd in float32."""
    nearest: Array = x.astype(np.float32)
    back = nearest.astype(np.float64)
    cut = np.where(np.absolute(back) > np.absolute(x), np.nextafter(nearest, np.float32(0)), nearest)
    inexact = (back != x) & (x == x)
    return (cut.view(np.uint32) | inexact).view(np.float32)


def _fma_16(a: Array, b: Array, c: Array) -> Array:
    exact: Array = a.astype(np.float64) * b + c
    return exact.astype(np.float16)


def _fma_bf16(a: Array, b: Array, c: Array) -> Array:
    x, y, z = (widen(operand).astype(np.float64) for operand in (a, b, c))
    return narrow(to_odd_32(to_odd(*two_sum(x * y, z))))


def through_32(kind: str, function: Function) -> Function:
    """Return `function` of float32 as a function of f16 or bf16: widen operands, round the result."""
    if kind == "f16":
        return lambda *xs: function(*(x.astype(np.float32) for x in xs)).astype(np.float16)
    return lambda *xs: narrow(function(*map(widen, xs)))


def _flush(x: Array) -> Array:
    """Return float16 with subnormal numbers replaced by zeros of their sign."""
    return x * (np.absolute(x) >= np.finfo(np.float16).smallest_normal)


def _operation(kind: str, paired: str, count: int, function: Function, flags: str = "") -> Operation:
    """Return the operation on f16 or bf16, alone or packed, with the modifiers among its flags."""
    plain = function
    if "sat" in flags:
        function = saturating(plain)
    elif "relu" in flags:
        clamp = through_32(kind, lambda x: np.maximum(x, np.float32(0)) + np.float32(0))

        def function(*xs: Array) -> Array:
            return clamp(plain(*xs))

    if "ftz" in flags:
        unflushed = function

        def function(*xs: Array) -> Array:
            return _flush(unflushed(*map(_flush, xs)))

    return uniform("b32", count, pairwise(kind, function)) if paired else uniform(kind, count, function)


SUMS: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@computes(
    rf"(add|sub|mul)(?:\.rn)?{words('ftz', 'sat')}\.(f16)(x2)?", r"(add|sub|mul)(?:\.rn)?()\.(bf16)(x2)?"
)
def sums(name: str, flags: str, kind: str, paired: str) -> Operation:
    """`add`, `sub` and `mul`."""
    function = SUMS[name] if kind == "f16" else through_32(kind, SUMS[name])
    return _operation(kind, paired, 2, function, flags)


@computes(rf"fma\.rn{words('ftz', 'sat', 'relu')}\.(f16)(x2)?", r"fma\.rn(\.relu)?\.(bf16)(x2)?")
def multiply_add(flags: str, kind: str, paired: str) -> Operation:
    """`fma`."""
    return _operation(kind, paired, 3, _fma_16 if kind == "f16" else _fma_bf16, flags)


@computes(rf"(min|max){words('ftz', 'NaN')}\.(f16)(x2)?", r"(min|max)(\.NaN)?\.(bf16)(x2)?")
def extreme(name: str, flags: str, kind: str, paired: str) -> Operation:
    """`min` and `max`."""
    return _operation(kind, paired, 2, through_32(kind, EXTREMES[name, "NaN" in flags]), flags)


@computes(r"(neg|abs)(\.ftz)?\.(f16)(x2)?", r"(neg|abs)()\.(bf16)(x2)?")
def sign(name: str, ftz: str, kind: str, paired: str) -> Operation:
    """`neg` and `abs`."""
    function: Function = np.negative if name == "neg" else np.absolute
    if kind == "bf16":
        bit = np.uint16(0x8000)
        function = (lambda x: x ^ bit) if name == "neg" else (lambda x: x & ~bit)
    return _operation(kind, paired, 1, function, ftz)


@computes(r"(ex2|tanh)\.approx(?:\.ftz)?\.(b?f16)(x2)?")
def approximation(name: str, kind: str, paired: str) -> Operation:
    """`ex2.approx` and `tanh.approx`."""
    return _operation(kind, paired, 1, through_32(kind, {"ex2": np.exp2, "tanh": np.tanh}[name]))
