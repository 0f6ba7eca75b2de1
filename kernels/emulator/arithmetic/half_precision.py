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

from ..base.operation import Builder, Function, Operation, pairwise, uniform
from ..ptx.dtypes import Array
from .floats import EXTREMES
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


def _operation(kind: str, count: int, function: Function) -> Operation:
    """Return the operation of this kind, also of packed pairs, from a function of f16 or bf16."""
    if kind.endswith("x2"):
        return uniform("b32", count, pairwise(kind[:-2], function))
    return uniform(kind, count, function)


def _modified(kind: str, function: Function, flags: set[str]) -> Function:
    """Return `function` with `.sat` or `.relu`; the caller handles `.ftz`."""
    if "sat" in flags:
        return saturating(function)
    if "relu" in flags:
        clamp = through_32(kind, lambda x: np.maximum(x, np.float32(0)) + np.float32(0))
        return lambda *xs: clamp(function(*xs))
    return function


def _flush(x: Array) -> Array:
    """Return float16 with subnormal numbers replaced by zeros of their sign."""
    return x * (np.absolute(x) >= np.finfo(np.float16).smallest_normal)


KINDS = ("f16", "bf16", "f16x2", "bf16x2")


def _arithmetic(opcode: tuple[str, ...]) -> Operation | None:
    """`add`, `sub`, `mul`, `fma`, `min` and `max`, `neg` and `abs`."""
    name, *given, kind = opcode
    flags = set(given)
    if kind not in KINDS:
        return None
    of_16 = kind.startswith("f16")
    one = kind.removesuffix("x2")
    allowed = {"add": {"rn", "ftz", "sat"}, "fma": {"rn", "ftz", "sat", "relu"}}
    allowed |= {"sub": allowed["add"], "mul": allowed["add"], "neg": {"ftz"}, "abs": {"ftz"}}
    allowed |= {"min": {"ftz", "NaN"}, "max": {"ftz", "NaN"}}
    if (
        flags - allowed[name]
        or (not of_16 and flags & {"ftz", "sat"})
        or (name == "fma" and "rn" not in flags)
    ):
        return None
    if name in ("neg", "abs"):
        function: Function = np.negative if name == "neg" else np.absolute
        if not of_16:
            sign = np.uint16(0x8000)
            function = (lambda x: x ^ sign) if name == "neg" else (lambda x: x & ~sign)
    elif name == "fma":
        function = _fma_16 if of_16 else _fma_bf16
    elif name in ("min", "max"):
        function = through_32(one, EXTREMES[name, "NaN" in flags])
    else:
        function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
        function = function if of_16 else through_32(one, function)
    function = _modified(one, function, flags)
    if "ftz" in flags:
        plain = function

        def function(*xs: Array) -> Array:
            return _flush(plain(*map(_flush, xs)))

    return _operation(kind, {"fma": 3, "neg": 1, "abs": 1}.get(name, 2), function)


def _approximation(opcode: tuple[str, ...]) -> Operation | None:
    """`ex2.approx` and `tanh.approx`."""
    name, *flags, kind = opcode
    if kind not in KINDS or flags not in (["approx"], ["approx", "ftz"]):
        return None
    function = through_32(kind.removesuffix("x2"), {"ex2": np.exp2, "tanh": np.tanh}[name])
    return _operation(kind, 1, function)


BUILDERS: dict[str, list[Builder]] = {
    **{name: [_arithmetic] for name in ("add", "sub", "mul", "fma", "min", "max", "neg", "abs")},
    "ex2": [_approximation],
    "tanh": [_approximation],
}
