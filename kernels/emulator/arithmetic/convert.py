"""`cvt`: convert from every type to every other.

Conversions to a float round once; to float32 and float64, in any mode. Conversions to an integer clamp to
its range; NaN becomes 0, or the number with only the highest bit set if the source is float64 or the result
has 64 bits.

Source: PTX ISA manual, "Data Movement and Conversion Instructions: cvt" and "Alternate Floating-Point Data
Formats".
"""

from __future__ import annotations

import numpy as np

from ..ptx.dtypes import DTYPES, Array
from .floats import narrow, shorten, widen
from .operations import Function, Operation, bits, computes, pack, words
from .rounding import MODES, flush, rounding, saturate

TO_INTEGER: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
KIND = r"([us](?:8|16|32|64)|f16|bf16|f32|f64)"


def _float_to_integer(kind: str, source: str, integral: Function) -> Function:
    dtype, size = DTYPES[kind], bits(kind)
    least, most = (-(1 << size - 1), (1 << size - 1) - 1) if kind[0] == "s" else (0, (1 << size) - 1)
    indefinite = 1 << size - 1 if kind[0] == "u" else least
    nan = np.array(indefinite if source == "f64" or size == 64 else 0, dtype)
    # The greatest 64-bit integer is no float64: clamp to the float64 below it, then fix what lies above.
    top = float(most) if size < 64 else float(np.nextafter(float(most), 0.0))
    largest = np.array(most, dtype)

    def function(x: Array) -> Array:
        whole = integral(x.astype(np.float64))
        result = np.minimum(np.maximum(whole, float(least)), top).astype(dtype)
        if size == 64:
            result = np.where(whole > top, largest, result)
        return np.where(np.isnan(whole), nan, result)

    return function


def _to_float(kind: str, source: str, mode: str) -> Function | None:
    dtype = DTYPES[kind]
    if kind == "bf16":
        return narrow if source == "f32" and mode == "rn" else None
    if kind == "f16" and mode != "rn":
        return None
    if source[0] == "u":  # some processors give -0 for 0, if they round down
        return rounding(mode, lambda x: np.absolute(x.astype(dtype)))
    return rounding(mode, lambda x: x.astype(dtype))


@computes(rf"cvt(?:\.({'|'.join((*MODES, *TO_INTEGER))}))?{words('ftz', 'sat')}\.{KIND}\.{KIND}")
def convert(mode: str, flags: str, kind: str, source: str) -> Operation | None:
    """`cvt{.mode}{.ftz}{.sat}.kind.source d, a`."""
    dtype, core = DTYPES[kind], None
    if kind[0] in "us" and source[0] in "us":
        core = (lambda x: x.astype(dtype)) if not mode and not flags else None
    elif kind[0] in "us":
        integral = TO_INTEGER.get(mode or "rzi")
        core = _float_to_integer(kind, source, integral) if integral else None
    elif mode in TO_INTEGER:
        core = TO_INTEGER[mode] if kind == source != "bf16" else None
    else:
        core = _to_float(kind, source, mode or "rn")
    if core is None:
        return None
    first = widen if source == "bf16" else flush if source == "f32" and "ftz" in flags else None
    after = [flush] if kind == "f32" and "ftz" in flags else []
    after += [saturate] if kind[0] not in "us" and "sat" in flags else []

    def function(x: Array) -> Array:
        x = core(first(x) if first else x)
        for stage in after:
            x = stage(x)
        return x

    return Operation(kind, (source,), function if first or after else core)


@computes(r"cvt\.rn\.(b?f16)x2\.f32")
def convert_pair(kind: str) -> Operation:
    """`cvt.rn.f16x2.f32 d, a, b`: a becomes the upper half."""
    one = _to_float(kind, "f32", "rn")
    assert one is not None
    return Operation("b32", ("f32", "f32"), lambda high, low: pack(one(low), one(high)))


@computes(r"cvt\.rna\.tf32\.f32")
def convert_to_tf32() -> Operation:
    """`cvt.rna.tf32.f32 d, a`."""

    def function(x: Array) -> Array:
        return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), shorten(x.view(np.uint32), 13, away=True))

    return Operation("b32", ("f32",), function)
