"""`cvt`: convert from every type to every other.

Conversions to a float round once, in any mode. Conversions to an integer clamp to its range; NaN becomes 0,
or the number with only the highest bit set if the source is float64 or the result has 64 bits.

The 8-bit floats e4m3 and e5m2 come in pairs (e4m3x2, e5m2x2). Both have subnormal numbers; only e5m2 has
infinities. Values beyond the range become the largest number (`.satfinite`, which PTX requires), and NaN
becomes 0x7F.

Source: PTX ISA manual, "Data Movement and Conversion Instructions: cvt" and "Alternate Floating-Point Data
Formats"; Micikevicius et al., FP8 Formats for Deep Learning, 2022, table 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ptx.dtypes import DTYPES, Array
from .floats import narrow, shorten, to_odd_32, widen
from .operations import Function, Operation, bits, computes, pack, unpack, words
from .rounding import MODES, flush, saturate, step

TO_INTEGER: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
LARGEST = {"f16": 65504.0, "bf16": 2.0**128 - 2.0**120, "tf32": 2.0**128 - 2.0**117}
KIND = r"([us](?:8|16|32|64)|f16|bf16|f32|f64)"
CLAMPS = words("relu", "satfinite")


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


def _is_integer(kind: str) -> bool:
    return kind[0] in "us"


def _conversion(kind: str, source: str, mode: str, clamp: bool) -> Function | None:
    """Return the conversion of `source` (f32 for bf16, which is widened before) to `kind`."""
    if _is_integer(kind) and _is_integer(source):
        return None if mode else _integer_to_integer(kind, source, clamp)
    if _is_integer(kind):
        return _float_to_integer(kind, source, TO_INTEGER[mode or "rzi"]) if mode not in MODES else None
    if mode not in TO_INTEGER:
        return _to_float(kind, mode or "rn")
    integral = TO_INTEGER[mode]
    if kind == "bf16":
        return lambda x: narrow(integral(x))
    return integral if kind == source else None


def _clamp(kind: str, flags: str) -> Function | None:
    """Return the clamp of a float32 for `.relu` (at least 0) and `.satfinite` (finite in `kind`)."""
    if not flags:
        return None
    high = np.float32(LARGEST[kind] if "satfinite" in flags else np.inf)
    low = np.float32(0) if "relu" in flags else -high
    return lambda x: np.clip(x, low, high)


def _chain(*stages: Function | None) -> Function:
    """Return a function that applies these stages in order; None stands for no stage."""
    first, *rest = [stage for stage in stages if stage is not None]
    if not rest:
        return first

    def function(x: Array) -> Array:
        y: Array = first(x)
        for stage in rest:
            y = stage(y)
        return y

    return function


@computes(
    rf"cvt(?:\.({'|'.join((*MODES, *TO_INTEGER))}))?{words('ftz', 'sat')}()\.{KIND}\.{KIND}",
    rf"cvt(?:\.({'|'.join(MODES)}))?{words('ftz', 'sat')}{CLAMPS}\.(f16|bf16)\.(f32)",
)
def convert(mode: str, flags: str, clamps: str, kind: str, source: str) -> Operation | None:
    """`cvt{.mode}{.ftz}{.sat}{.relu}{.satfinite}.kind.source d, a`."""
    core = _conversion(kind, "f32" if source == "bf16" else source, mode, "sat" in flags)
    if core is None or (kind == source == "f16" and not mode):
        return None
    stages: list[Any] = [
        widen if source == "bf16" else None,
        flush if source == "f32" and "ftz" in flags else None,
        _clamp(kind, clamps),
        core,
        flush if kind == "f32" and "ftz" in flags else None,
        saturate if kind in ("f16", "f32", "f64") and "sat" in flags else None,
    ]
    return Operation(kind, (source,), _chain(*stages))


@computes(rf"cvt\.(rn|rz){CLAMPS}\.(b?f16)x2\.f32")
def convert_pair(mode: str, clamps: str, kind: str) -> Operation:
    """`cvt.rn.f16x2.f32 d, a, b`: a becomes the upper half."""
    one = _chain(_clamp(kind, clamps), _to_float(kind, mode))
    return Operation("b32", ("f32", "f32"), lambda high, low: pack(one(low), one(high)))


@computes(rf"cvt\.(rn|rz|rna){CLAMPS}\.tf32\.f32")
def convert_to_tf32(mode: str, clamps: str) -> Operation:
    """`cvt.rna.tf32.f32 d, a`."""

    def shortened(x: Array) -> Array:
        return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), shorten(x.view(np.uint32), 13, mode))

    return Operation("b32", ("f32",), _chain(_clamp("tf32", clamps), shortened))


@dataclass(frozen=True)
class Format:
    """A float of 8 bits."""

    significand: int  # stored bits of the significand
    least: int  # exponent of the smallest normal number
    largest: int  # the bits of the largest finite number


FORMATS = {"e4m3": Format(3, -6, 0x7E), "e5m2": Format(2, -14, 0x7B)}


def encode(x: Array, form: Format) -> Array:
    """Return x (float32 or float16) rounded to nearest, as bits in uint16."""
    magnitude = np.absolute(x.astype(np.float64))
    # The code of a number is its rank: codes of one exponent follow those of the exponent below.
    exponent = np.frexp(np.maximum(magnitude, 2.0**form.least))[1] - 1
    units = np.rint(np.ldexp(magnitude, form.significand - exponent))
    count = units + (exponent - form.least) * 2.0**form.significand
    bits = np.where(np.isnan(x), 0x7F, np.fmin(count, form.largest)).astype(np.uint16)
    return bits | (np.signbit(x) & ~np.isnan(x)) * np.uint16(0x80)


@functools.cache
def _values(form: Format) -> Array:
    """Return the value of each of the 256 codes."""
    codes = np.arange(256, dtype=np.float64)
    exponent, units = np.divmod(codes % 128, 2.0**form.significand)
    normal = exponent > 0
    magnitude = np.ldexp(
        units + normal * 2.0**form.significand,
        (form.least - form.significand + exponent - normal).astype(np.int32),
    )
    beyond = np.nan if form.largest == 0x7E else np.inf
    magnitude = np.where(codes % 128 == form.largest + 1, beyond, magnitude)
    magnitude = np.where(codes % 128 > form.largest + 1, np.nan, magnitude)
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float16)


EIGHT = r"(e4m3|e5m2)x2"


@computes(rf"cvt\.rn\.satfinite(\.relu)?\.{EIGHT}\.(f32|f16x2)")
def convert_to_8(relu: str, kind: str, source: str) -> Operation:
    """`cvt.rn.satfinite{.relu}.e4m3x2.f32 d, a, b` (a becomes the upper half), or `...f16x2 d, a`."""
    form = FORMATS[kind]

    def to_8(high: Array, low: Array) -> Any:
        if relu:
            high, low = np.maximum(high, 0), np.maximum(low, 0)
        return (encode(high, form) << np.uint16(8)) | encode(low, form)

    if source == "f32":
        return Operation("b16", ("f32", "f32"), to_8)
    return Operation("b16", ("b32",), lambda x: to_8(*reversed(unpack(x, "f16"))))


@computes(rf"cvt\.rn(\.relu)?\.f16x2\.{EIGHT}")
def convert_from_8(relu: str, source: str) -> Operation:
    """`cvt.rn{.relu}.f16x2.e4m3x2 d, a`."""
    values = _values(FORMATS[source])
    if relu:
        values = np.where(values < 0, np.float16(0), values)
    return Operation("b32", ("b16",), lambda x: pack(values[x & np.uint16(0xFF)], values[x >> np.uint16(8)]))
