"""Rounding modes (to nearest, towards zero, down, up), `.ftz` and `.sat`, and the fused multiply-add.

The processor rounds as PTX asks: the C library's `fesetround` sets the mode of the calling thread, and
NumPy's loops and Numba's machine code obey it, conversions included.

NumPy has no cheap a * b + c that rounds once. For float32, a detour through float64 takes two to five times
as long and rounds some sums twice; for float64 it takes a dozen operations. Numba, which compiles the kernels
anyway, emits LLVM's `fma`: a processor instruction, or the exact function of the C library. Flushing takes
one pass with Numba and three in NumPy. Numba needs half a second to start, and less than a tenth for each
further function, so each is compiled when an instruction first needs it.

Source: PTX ISA manual, "Floating-Point Instructions"; IEEE 754-2019, sections 4.3 and 6.3; C17, 7.6.3.2.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import numpy as np

from ..ptx.dtypes import DTYPES, Array
from .operations import Function

# To nearest (ties to even), towards zero, down (minus), up (plus): numbers of this processor's <fenv.h>.
MODES = {"rn": 0, "rz": 3 << 10, "rm": 1 << 10, "rp": 2 << 10}
if platform.machine().lower() not in ("x86_64", "amd64"):  # ARM
    MODES = {"rn": 0, "rz": 3 << 22, "rm": 2 << 22, "rp": 1 << 22}
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_set_mode = ctypes.CDLL(None).fesetround


def rounding(mode: str, function: Function) -> Function:
    """Return `function`, whose operations and conversions round in this mode."""
    if mode == "rn":
        return function

    def rounded(*xs: Array) -> Any:
        try:
            _set_mode(MODES[mode])
            return function(*xs)
        finally:
            _set_mode(MODES["rn"])

    return rounded


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
