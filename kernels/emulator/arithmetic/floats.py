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

from ..base.operation import Builder, Function, Operation, pairwise, uniform
from ..ptx.dtypes import Array
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


def _arithmetic(opcode: tuple[str, ...]) -> Operation | None:
    """`add`, `sub`, `mul` (to nearest if they name no mode), `fma`, `div`, `rcp` and `sqrt`."""
    name, *flags, kind = opcode
    counts = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}
    modes = [flag for flag in flags if flag in MODES]
    others = {flag for flag in flags if flag not in MODES}
    if (
        kind not in ("f32", "f64", "f32x2")
        or len(modes) > 1
        or (not modes and name not in ("add", "sub", "mul"))
    ):
        return None
    if others - {"ftz", "sat"} or (others and kind == "f64") or ("sat" in others and kind == "f32x2"):
        return None
    function = rounded("fma" if name == "mad" else name, kind[:3], modes[0] if modes else "rn")
    if "ftz" in others:
        function = flushing(function)
    if "sat" in others:
        function = saturating(function)
    if kind == "f32x2":
        return uniform("b64", counts[name], pairwise("f32", function)) if counts[name] > 1 else None
    return uniform(kind, counts[name], function)


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


def _approximation(opcode: tuple[str, ...]) -> Operation | None:
    """Instructions with `.approx`, and `div.full`."""
    name, *flags, kind = opcode
    precision = flags[0] if flags else ""
    ftz = flags[1:] == ["ftz"]
    if not (precision == "approx" or (name, precision) == ("div", "full")) or (flags[1:] and not ftz):
        return None
    count, function = APPROXIMATIONS[name]
    if kind == "f32":
        return uniform(kind, count, flushing(function) if ftz else function)
    if kind == "f64" and name in ("rcp", "rsqrt") and (ftz or name == "rsqrt"):
        return uniform(kind, count, _coarse(function) if ftz else function)
    return None


def _sign(opcode: tuple[str, ...]) -> Operation | None:
    """`neg` and `abs`."""
    name, *flags, kind = opcode
    function: Function = np.negative if name == "neg" else np.absolute
    if kind not in ("f32", "f64") or flags not in ([], ["ftz"]) or (flags and kind == "f64"):
        return None
    return uniform(kind, 1, flushing(function) if flags else function)


def _extreme(opcode: tuple[str, ...]) -> Operation | None:
    """`min` and `max`. `.NaN` returns NaN for a NaN; `.xorsign.abs` gives magnitudes the product's sign."""
    name, *flags, kind = opcode
    flags = [flag for flag in flags if flag not in ("xorsign", "abs")]
    signed = len(flags) < len(opcode) - 2
    if kind not in ("f32", "f64") or set(flags) - {"ftz", "NaN"} or ((flags or signed) and kind == "f64"):
        return None
    if signed and opcode[-3:-1] != ("xorsign", "abs"):
        return None
    function = EXTREMES[name, "NaN" in flags]
    if signed:
        plain = function

        def function(a: Array, b: Array) -> Any:
            sign = np.where(np.signbit(a) != np.signbit(b), -ONE, ONE)
            return np.copysign(plain(np.absolute(a), np.absolute(b)), sign)

    return uniform(kind, 2, flushing(function) if "ftz" in flags else function)


def _copysign(opcode: tuple[str, ...]) -> Operation | None:
    """`copysign d, a, b`: b with the sign of a."""
    if opcode[1:] not in (("f32",), ("f64",)):
        return None
    return uniform(opcode[1], 2, lambda a, b: np.copysign(b, a))


BUILDERS: dict[str, list[Builder]] = {
    **{name: [_approximation] for name in APPROXIMATIONS},
    **{name: [_arithmetic] for name in ("add", "sub", "mul", "fma", "mad")},
    **{name: [_arithmetic, _approximation] for name in ("div", "rcp", "sqrt")},
    "neg": [_sign],
    "abs": [_sign],
    "min": [_extreme],
    "max": [_extreme],
    "copysign": [_copysign],
}
