"""Arithmetic of float32 and float64, and of float16 and bfloat16, alone and packed in pairs (f16x2, bf16x2).

In float32 and float64, add, sub, mul and fma, and div, rcp and sqrt with a rounding mode, round as IEEE 754
says. The `.approx` and `.full` forms are NumPy's float32 functions. These are more accurate than a GPU's, so
the results of approximate instructions differ from a GPU's in the last bits.

A bfloat16 is the upper half of a float32; arrays hold its bits. Sums, products, quotients and roots of 16
bits are computed in float32 and rounded again. The second rounding does no harm, since float32 has more than
twice the bits of either, plus two (Figueroa, When is double rounding innocuous?, 1995). A fused multiply-add
goes through float64. For float16 the sum is exact there, or so close to c that it rounds to c. For bfloat16
it is rounded to odd, which keeps a later rounding to fewer bits right (Boldo and Melquiond, Emulation of a
FMA and correctly rounded sums using round-to-odd, 2008).

Source: PTX ISA manual, "Floating-Point Instructions" and "Half Precision Floating-Point Instructions".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..ptx.dtypes import Array
from .operations import Function, Operation, computes, pairwise, uniform, words
from .rounding import MODES, flushing, rounded, saturating, two_sum

UPPER = np.uint64(0xFFFFFFFF00000000)
ONE = np.float32(1)


def _chosen(choose: Function, combine: Function, a: Array, b: Array) -> Array:
    # Equal numbers have equal bits, except zeros of different sign; `combine` chooses the sign.
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    equal = combine(a.view(unsigned), b.view(unsigned)).view(a.dtype)
    return np.where(a == b, equal, choose(a, b))


# By name, and whether a NaN beats a number or loses to it. -0 is less than +0.
EXTREMES: dict[tuple[str, bool], Function] = {
    ("min", False): partial(_chosen, np.fmin, np.bitwise_or),
    ("max", False): partial(_chosen, np.fmax, np.bitwise_and),
    ("min", True): partial(_chosen, np.minimum, np.bitwise_or),
    ("max", True): partial(_chosen, np.maximum, np.bitwise_and),
}


OPERANDS = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}


@computes(rf"({'|'.join(OPERANDS)})(?:\.({'|'.join(MODES)}))?{words('ftz', 'sat')}\.(f32|f64|f32x2)")
def arithmetic(name: str, mode: str, flags: str, kind: str) -> Operation | None:
    """`add`, `sub`, `mul` (to nearest if they name no mode), `fma`, `div`, `rcp` and `sqrt`."""
    paired, count = kind == "f32x2", OPERANDS[name]
    if not mode and name not in ("add", "sub", "mul"):
        return None
    if (flags and kind == "f64") or (paired and ("sat" in flags or count == 1)):
        return None
    function = rounded("fma" if name == "mad" else name, kind[:3], mode or "rn")
    if "ftz" in flags:
        function = flushing(function)
    if "sat" in flags:
        function = saturating(function)
    return uniform("b64", count, pairwise("f32", function)) if paired else uniform(kind, count, function)


def _coarse(function: Function) -> Function:
    """Return `function` as `.approx.ftz.f64`: it uses the upper 32 bits, and flushes subnormals to zero."""

    def upper(x: Array) -> Any:
        normal = np.absolute(x) >= np.finfo(np.float64).smallest_normal
        return (x.view(np.uint64) & UPPER).view(np.float64) * normal

    return lambda x: upper(function(upper(x)))


APPROXIMATIONS: dict[str, tuple[int, Function]] = {
    "div": (2, np.divide),
    "rcp": (1, lambda x: ONE / x),
    "sqrt": (1, np.sqrt),
    "rsqrt": (1, lambda x: ONE / np.sqrt(x)),
    "sin": (1, np.sin),
    "cos": (1, np.cos),
    "ex2": (1, np.exp2),
    "lg2": (1, np.log2),
    "tanh": (1, np.tanh),
}


@computes(rf"({'|'.join(APPROXIMATIONS)})\.approx(\.ftz)?\.(f32|f64)", r"(div)\.full(\.ftz)?\.(f32)")
def approximation(name: str, ftz: str, kind: str) -> Operation | None:
    """Instructions with `.approx`, and `div.full`."""
    count, function = APPROXIMATIONS[name]
    if kind == "f32":
        return uniform(kind, count, flushing(function) if ftz else function)
    if name == "rsqrt" or (name == "rcp" and ftz):
        return uniform(kind, count, _coarse(function) if ftz else function)
    return None


@computes(r"(neg|abs)(\.ftz)?\.(f32)", r"(neg|abs)()\.(f64)")
def sign(name: str, ftz: str, kind: str) -> Operation:
    """`neg` and `abs`."""
    function: Function = np.negative if name == "neg" else np.absolute
    return uniform(kind, 1, flushing(function) if ftz else function)


@computes(rf"(min|max){words('ftz', 'NaN')}(\.xorsign\.abs)?\.(f32)", r"(min|max)()()\.(f64)")
def extreme(name: str, flags: str, signed: str, kind: str) -> Operation:
    """`min` and `max`. `.NaN` returns NaN for a NaN; `.xorsign.abs` gives magnitudes the product's sign."""
    plain = function = EXTREMES[name, "NaN" in flags]
    if signed:

        def function(a: Array, b: Array) -> Any:
            sign = np.where(np.signbit(a) != np.signbit(b), -ONE, ONE)
            return np.copysign(plain(np.absolute(a), np.absolute(b)), sign)

    return uniform(kind, 2, flushing(function) if "ftz" in flags else function)


@computes(r"copysign\.(f32|f64)")
def copysign(kind: str) -> Operation:
    """`copysign d, a, b`: b with the sign of a."""
    return uniform(kind, 2, lambda a, b: np.copysign(b, a))


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
def sums_16(name: str, flags: str, kind: str, paired: str) -> Operation:
    """`add`, `sub` and `mul`."""
    function = SUMS[name] if kind == "f16" else through_32(kind, SUMS[name])
    return _operation(kind, paired, 2, function, flags)


@computes(rf"fma\.rn{words('ftz', 'sat', 'relu')}\.(f16)(x2)?", r"fma\.rn(\.relu)?\.(bf16)(x2)?")
def multiply_add_16(flags: str, kind: str, paired: str) -> Operation:
    """`fma`."""
    return _operation(kind, paired, 3, _fma_16 if kind == "f16" else _fma_bf16, flags)


@computes(rf"(min|max){words('ftz', 'NaN')}\.(f16)(x2)?", r"(min|max)(\.NaN)?\.(bf16)(x2)?")
def extreme_16(name: str, flags: str, kind: str, paired: str) -> Operation:
    """`min` and `max`."""
    return _operation(kind, paired, 2, through_32(kind, EXTREMES[name, "NaN" in flags]), flags)


@computes(r"(neg|abs)(\.ftz)?\.(f16)(x2)?", r"(neg|abs)()\.(bf16)(x2)?")
def sign_16(name: str, ftz: str, kind: str, paired: str) -> Operation:
    """`neg` and `abs`."""
    function: Function = np.negative if name == "neg" else np.absolute
    if kind == "bf16":
        bit = np.uint16(0x8000)
        function = (lambda x: x ^ bit) if name == "neg" else (lambda x: x & ~bit)
    return _operation(kind, paired, 1, function, ftz)


@computes(r"(ex2|tanh)\.approx(?:\.ftz)?\.(b?f16)(x2)?")
def approximation_16(name: str, kind: str, paired: str) -> Operation:
    """`ex2.approx` and `tanh.approx`."""
    return _operation(kind, paired, 1, through_32(kind, {"ex2": np.exp2, "tanh": np.tanh}[name]))
