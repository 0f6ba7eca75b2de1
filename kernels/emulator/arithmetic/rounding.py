"""Rounding modes (to nearest, towards zero, down, up), and the modifiers `.ftz` and `.sat`.

Directed rounding starts from the nearest number r and moves it one step if the exact result lies on the other
side. So it needs only the sign of the residual, (exact result - r). For float32 this sign is right in
float64: products of two are exact there, and the error of a sum is itself a float64 (Knuth, The Art of
Computer Programming, volume 2, section 4.2.2, theorem B). For float64, where directed rounding is rare, it
comes from Python's fractions, element by element.

NumPy has no cheap a * b + c that rounds once. For float32, a detour through float64 takes two to five times
as long and rounds some sums twice; for float64 it takes a dozen operations. Numba, which compiles the kernels
anyway, emits LLVM's `fma`: a processor instruction, or the exact function of the C library. Flushing takes
one pass with Numba and three in NumPy. Numba needs half a second to start, and less than a tenth for each
further function, so each is compiled when an instruction first needs it.

Source: PTX ISA manual, "Floating-Point Instructions"; IEEE 754-2019, sections 4.3 and 6.3.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from ..ptx.dtypes import DTYPES, Array
from .operations import Function

MODES = ("rn", "rz", "rm", "rp")  # to nearest (ties to even), towards zero, down (minus), up (plus)
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


@functools.cache
def fused_multiply_add(kind: str) -> Any:
    """Return the ufunc a * b + c of this kind ("f32", "f64"), rounded once."""
    from numba.extending import intrinsic

    @intrinsic
    def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.fma(*arguments)

        return a(a, b, c), generate

    return _compiled(lambda a, b, c: fma(a, b, c), kind, 3)


@functools.cache
def _flush() -> Any:
    smallest, zero = SMALLEST_NORMAL, np.float32(0)
    return _compiled(lambda x: x * zero if abs(x) < smallest else x, "f32", 1)


def _compiled(function: Any, kind: str, operands: int) -> Any:
    from numba import vectorize

    dtype = DTYPES[kind].name
    wrapper = vectorize([f"{dtype}({', '.join([dtype] * operands)})"])(function)
    return wrapper.ufunc  # a call of Numba's wrapper takes three times as long


def flush(x: Array) -> Array:
    """Return x (float32) with subnormal numbers replaced by zeros of their sign."""
    return _flush()(x)


def flushing(function: Function) -> Function:
    """Return `function` with `.ftz`: subnormal float32 operands and results count as zeros."""
    flush = _flush()
    return lambda *xs: flush(function(*map(flush, xs)))


def saturate(x: Array) -> Array:
    """Return x clamped to [0, 1]; NaN and -0 become +0."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    return np.where(x > zero, np.minimum(x, one), zero)


def saturating(function: Function) -> Function:
    """Return `function` with `.sat`: results are clamped to [0, 1]."""
    return lambda *xs: saturate(function(*xs))


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum s and its error e: s + e = a + b exactly."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def step(nearest: Array, residual: Array, mode: str) -> Array:
    """Return `nearest` rounded in `mode`; `residual` has the sign of exact - nearest (NaN counts as 0)."""
    if mode == "rn":
        return nearest
    towards = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}[mode]
    wrong = {"rz": residual * np.sign(nearest) < 0, "rm": residual < 0, "rp": residual > 0}[mode]
    return np.where(wrong, np.nextafter(nearest, nearest.dtype.type(towards)), nearest)


def nearest(name: str, kind: str) -> Function:
    """Return the function of this name ("add", "fma", ...) on operands of `kind`, rounded to nearest."""
    if name == "fma":
        return fused_multiply_add(kind)
    functions: dict[str, Function] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "sqrt": np.sqrt,
        "rcp": lambda x: x.dtype.type(1) / x,
    }
    return functions[name]


def rounded(name: str, kind: str, mode: str) -> Function:
    """Return the function of this name on operands of `kind` ("f32", "f64"), rounded in `mode`."""
    function = nearest(name, kind)
    if mode == "rn":
        return function
    residual = _RESIDUALS_32[name] if kind == "f32" else _exactly(name)

    def directed(*xs: Array) -> Array:
        r = function(*xs)
        error = residual(r, *xs)
        result = step(r, error, mode)
        if mode == "rm" and name in ("add", "sub", "fma"):
            # x - x is -0 in this mode and +0 in all others.
            x, y = _terms(name, xs)
            cancelled = (r == 0) & (error == 0) & (np.signbit(x) | np.signbit(y))
            result = np.where(cancelled, -np.absolute(r), result)
        return result

    return directed


def _terms(name: str, xs: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the two terms of a sum; only their signs matter."""
    if name == "add":
        return xs[0], xs[1]
    return (xs[0], -xs[1]) if name == "sub" else (xs[0] * xs[1], xs[2])


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _sum_32(r: Array, a: Array, b: Array) -> Array:
    """Return the residual of a + b, with terms in float64."""
    s, e = two_sum(a, b)
    return (s - _wide(r)) + e


# Each takes the rounded result and the operands. Only the residual's sign matters, so quotients are
# multiplied by the divisor, and roots squared.
_RESIDUALS_32: dict[str, Function] = {
    "add": lambda r, a, b: _sum_32(r, _wide(a), _wide(b)),
    "sub": lambda r, a, b: _sum_32(r, _wide(a), -_wide(b)),
    "mul": lambda r, a, b: _wide(a) * _wide(b) - r,
    "fma": lambda r, a, b, c: _sum_32(r, _wide(a) * _wide(b), _wide(c)),
    "div": lambda r, a, b: (_wide(a) - _wide(r) * _wide(b)) * np.sign(b),
    "rcp": lambda r, a: (1 - _wide(r) * _wide(a)) * np.sign(a),
    "sqrt": lambda r, a: _wide(a) - _wide(r) * _wide(r),
}
_RESIDUALS: dict[str, Function] = {
    "add": lambda r, a, b: a + b - r,
    "sub": lambda r, a, b: a - b - r,
    "mul": lambda r, a, b: a * b - r,
    "fma": lambda r, a, b, c: a * b + c - r,
    "div": lambda r, a, b: a / b - r,
    "rcp": lambda r, a: 1 / a - r,
    "sqrt": lambda r, a: a - r * r,
}


def _exactly(name: str) -> Function:
    """Return a function that computes the sign of the residual with fractions."""
    residual = _RESIDUALS[name]

    def sign(*xs: float) -> float:
        r, *operands = xs
        if (
            math.isnan(r)
            or not all(map(math.isfinite, operands))
            or (name in ("div", "rcp") and not operands[-1])
        ):
            return 0.0  # no rounding took place
        if math.isinf(r):
            return -r  # the exact result is finite, but too large
        error = residual(*map(Fraction, xs))
        return float((error > 0) - (error < 0))

    signs = np.frompyfunc(sign, residual.__code__.co_argcount, 1)
    return lambda *xs: np.asarray(signs(*xs), np.float64)
