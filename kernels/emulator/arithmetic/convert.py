"""`cvt`: convert from every type to every other.

Conversions to a float round once, in any mode. Conversions to an integer clamp to its range; NaN becomes 0,
or the number with only the highest bit set if the source is float64 or the result has 64 bits.

Source: PTX ISA manual, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.operation import Builder, Function, Operation, bits, pack
from ..ptx.dtypes import DTYPES, Array
from .convert_float8 import convert_8
from .half_precision import narrow, shorten, to_odd_32, widen
from .rounding import MODES, flush, saturate, step

INTEGERS = tuple(f"{letter}{size}" for letter in "us" for size in (8, 16, 32, 64))
FLOATS = ("f16", "bf16", "f32", "f64")
TO_INTEGER: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
LARGEST = {"f16": 65504.0, "bf16": 2.0**128 - 2.0**120, "tf32": 2.0**128 - 2.0**117}


def _limits(kind: str) -> tuple[int, int]:
    size = bits(kind)
    return (-(1 << size - 1), (1 << size - 1) - 1) if kind[0] == "s" else (0, (1 << size) - 1)


def _integer_to_integer(kind: str, source: str, clamp: bool) -> Function:
    dtype, of = DTYPES[kind], DTYPES[source]
    if not clamp:
        return lambda x: x.astype(dtype)
    (least, most), (smallest, largest) = _limits(kind), _limits(source)
    low, high = np.array(max(least, smallest), of), np.array(min(most, largest), of)
    return lambda x: np.clip(x, low, high).astype(dtype)


def _float_to_integer(kind: str, source: str, integral: Function) -> Function:
    dtype, (least, most) = DTYPES[kind], _limits(kind)
    indefinite = 1 << bits(kind) - 1 if kind[0] == "u" else least
    nan = np.array(indefinite if source == "f64" or bits(kind) == 64 else 0, dtype)
    # The greatest 64-bit integer is no float64: clamp to the float64 below it, then fix what lies above.
    top = float(most) if bits(kind) < 64 else float(np.nextafter(float(most), 0.0))
    largest = np.array(most, dtype)

    def function(x: Array) -> Array:
        whole = integral(x.astype(np.float64))
        result = np.minimum(np.maximum(whole, float(least)), top).astype(dtype)
        if bits(kind) == 64:
            result = np.where(whole > top, largest, result)
        return np.where(np.isnan(whole), nan, result)

    return function


def _residual(x: Array, r: Array) -> Array:
    """Return a float64 with the sign of x - r, where r (float64) is x rounded."""
    if x.dtype.kind == "f" or x.dtype.itemsize < 8:
        return x.astype(np.float64) - r
    # Two float64 hold 64 bits. r is so close that the first difference is exact.
    upper, lower = x >> x.dtype.type(32), x & x.dtype.type(0xFFFFFFFF)
    return (upper.astype(np.float64) * 2.0**32 - r) + lower.astype(np.float64)


def _nearly_32(x: Array) -> Array:
    """Return x as float32, rounded to odd if inexact, so that it can be rounded again to fewer bits."""
    if x.dtype == np.float64:
        return to_odd_32(x)
    nearest: Array = x.astype(np.float32)
    if x.dtype.kind == "f":
        return nearest
    error = _residual(x, nearest.astype(np.float64))
    return (step(nearest, error, "rz").view(np.uint32) | (error != 0)).view(np.float32)


def _to_float(kind: str, mode: str) -> Function:
    """Return the conversion to `kind` of integers and of f16, f32 and f64."""
    if kind == "bf16":
        return lambda x: narrow(_nearly_32(x), mode)
    dtype = DTYPES[kind]
    if mode == "rn":
        return lambda x: x.astype(dtype)

    def directed(x: Array) -> Array:
        nearest = x.astype(dtype)
        return step(nearest, _residual(x, nearest.astype(np.float64)), mode)

    return directed


def _conversion(kind: str, source: str, mode: str, clamp: bool) -> Function | None:
    """Return the conversion of `source` (f32 for bf16, which is widened before) to `kind`."""
    if kind in INTEGERS and source in INTEGERS:
        return None if mode else _integer_to_integer(kind, source, clamp)
    if kind in INTEGERS:
        return _float_to_integer(kind, source, TO_INTEGER[mode or "rzi"]) if mode not in MODES else None
    if mode not in TO_INTEGER:
        return _to_float(kind, mode or "rn")
    integral = TO_INTEGER[mode]
    if kind == "bf16":
        return lambda x: narrow(integral(x))
    return integral if kind == source else None


def _clamp(kind: str, flags: set[str]) -> Function:
    """Return the clamp of a float32 for `.relu` (at least 0) and `.satfinite` (finite in `kind`)."""
    high = np.float32(LARGEST[kind] if "satfinite" in flags else np.inf)
    low = np.float32(0) if "relu" in flags else -high
    return lambda x: np.clip(x, low, high)


def _cvt(opcode: tuple[str, ...]) -> Operation | None:
    """`cvt{.mode}{.ftz}{.sat}{.relu}{.satfinite}.kind.source d, a`."""
    if len(opcode) < 3 or not {*opcode[-2:]} <= {*INTEGERS, *FLOATS}:
        return None
    *given, kind, source = opcode[1:]
    modes = [flag for flag in given if flag in MODES or flag in TO_INTEGER]
    flags = set(given) - set(modes)
    clamps = flags & {"relu", "satfinite"}
    if flags - clamps - {"ftz", "sat"} or len(modes) > 1 or (clamps and (source, kind) not in NARROWING):
        return None
    core = _conversion(kind, "f32" if source == "bf16" else source, modes[0] if modes else "", "sat" in flags)
    if core is None or (kind == source == "f16" and not modes):
        return None
    stages: list[Any] = [
        widen if source == "bf16" else None,
        flush if source == "f32" and "ftz" in flags else None,
        _clamp(kind, clamps) if clamps else None,
        core,
        flush if kind == "f32" and "ftz" in flags else None,
        saturate if kind in ("f16", "f32", "f64") and "sat" in flags else None,
    ]
    return Operation(kind, (source,), _chain(*stages))


NARROWING = (("f32", "f16"), ("f32", "bf16"))


def _chain(*stages: Function | None) -> Function:
    """Return a function that applies these stages in order."""
    first, *rest = [stage for stage in stages if stage is not None]
    if not rest:
        return first

    def function(x: Array) -> Array:
        y: Array = first(x)
        for stage in rest:
            y = stage(y)
        return y

    return function


def _pair(opcode: tuple[str, ...]) -> Operation | None:
    """`cvt.rn.f16x2.f32 d, a, b` (a becomes the upper half), and `cvt.rna.tf32.f32 d, a`."""
    if len(opcode) < 4 or opcode[-1] != "f32":
        return None
    mode, *flags, kind = opcode[1:-1]
    clamps = set(flags)
    modes = ("rn", "rz", "rna") if kind == "tf32" else ("rn", "rz")
    if mode not in modes or clamps - {"relu", "satfinite"}:
        return None
    if kind == "tf32":

        def shortened(x: Array) -> Array:
            return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), shorten(x.view(np.uint32), 13, mode))

        return Operation("b32", ("f32",), _chain(_clamp(kind, clamps) if clamps else None, shortened))
    if kind not in ("f16x2", "bf16x2"):
        return None
    half = kind.removesuffix("x2")
    one = _chain(_clamp(half, clamps) if clamps else None, _to_float(half, mode))
    return Operation("b32", ("f32", "f32"), lambda high, low: pack(one(low), one(high)))


BUILDERS: dict[str, list[Builder]] = {"cvt": [_cvt, _pair, convert_8]}
