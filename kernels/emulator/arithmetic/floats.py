"""Arithmetic of float32 and float64.

add, sub, mul and fma, and div, rcp and sqrt with a rounding mode, round as IEEE 754 says. The `.approx` and
`.full` forms are NumPy's float32 functions. These are more accurate than a GPU's, so the results of
approximate instructions differ from a GPU's in the last bits.

Source: PTX ISA manual, "Floating-Point Instructions".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..ptx.dtypes import Array
from .operations import Function, Operation, computes, pairwise, uniform, words
from .rounding import MODES, flushing, rounded, saturating

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
