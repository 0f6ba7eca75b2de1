"""Conversions to and from the 8-bit floats e4m3 and e5m2, which come in pairs (e4m3x2, e5m2x2).

Both have subnormal numbers; only e5m2 has infinities. Values beyond the range become the largest number
(`.satfinite`, which PTX requires), and NaN becomes 0x7F.

Source: PTX ISA manual, "Alternate Floating-Point Data Formats"; Micikevicius et al., FP8 Formats for Deep
Learning, 2022, table 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.operation import Operation, pack, unpack
from ..ptx.dtypes import Array


@dataclass(frozen=True)
class Format:
    """A float of 8 bits."""

    significand: int  # stored bits of the significand
    least: int  # exponent of the smallest normal number
    largest: int  # the bits of the largest finite number


FORMATS = {"e4m3x2": Format(3, -6, 0x7E), "e5m2x2": Format(2, -14, 0x7B)}


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


def convert_8(opcode: tuple[str, ...]) -> Operation | None:
    """`cvt` to or from e4m3x2 or e5m2x2."""
    if len(opcode) < 3:
        return None
    *given, kind, source = opcode[1:]
    flags = set(given)
    relu = "relu" in flags
    flags.discard("relu")
    if kind in FORMATS and source in ("f32", "f16x2") and flags == {"rn", "satfinite"}:
        form = FORMATS[kind]

        def to_8(high: Array, low: Array) -> Any:
            if relu:
                high, low = np.maximum(high, 0), np.maximum(low, 0)
            return (encode(high, form) << np.uint16(8)) | encode(low, form)

        if source == "f32":
            return Operation("b16", ("f32", "f32"), to_8)
        return Operation("b16", ("b32",), lambda x: to_8(*reversed(unpack(x, "f16"))))
    if kind == "f16x2" and source in FORMATS and flags == {"rn"}:
        values = _values(FORMATS[source])
        if relu:
            values = np.where(values < 0, np.float16(0), values)
        return Operation(
            "b32", ("b16",), lambda x: pack(values[x & np.uint16(0xFF)], values[x >> np.uint16(8)])
        )
    return None
