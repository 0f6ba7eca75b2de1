"""Numbers as the report prints them: durations, bytes, counts and ratios, rounded and with their units."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """Format a duration with three significant digits: `3.14 ms`."""
    for limit, unit in ((1e-6, "ns"), (1e-3, "µs"), (1.0, "ms")):
        if value < limit:
            return f"{_three(value * 1000 / limit)} {unit}"
    return f"{_three(value)} s"


def size(value: float) -> str:
    """Format bytes with three significant digits: `26.5 KB` (decimal units, as networks count)."""
    if value < 1e3:
        return f"{value:.0f} B"
    for limit, unit in ((1e6, "KB"), (1e9, "MB")):
        if value < limit:
            return f"{_three(value * 1000 / limit)} {unit}"
    return f"{_three(value / 1e9)} GB"


def binary_size(value: int) -> str:
    """Format a power of two of bytes: `64 KiB`."""
    for limit, unit in ((2**10, "B"), (2**20, "KiB"), (2**30, "MiB")):
        if value < limit:
            return f"{value * 2**10 // limit} {unit}"
    return f"{value >> 30} GiB"


def number(value: float) -> str:
    """Format a count or a rate with three significant digits and separated thousands: `12,300`."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else _three(value)


def times(ratio: float) -> str:
    """Format a ratio with two decimals, or from 100 on with three digits: `0.92`, `24.89`, `10,300`."""
    return number(ratio) if ratio >= 100 else f"{ratio:.2f}"


def kind_name(dtype: str) -> str:
    """Name the arithmetic of a product: `TF32` (not a dtype that memory holds), or else the dtype."""
    return "TF32" if dtype == "tf32" else dtype


def difference(value: float) -> str:
    """Format a difference of durations with its sign: `+3.14 µs`."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def count(value: float) -> str:
    """Format a count with all its digits and separated thousands; a fraction with four digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _three(value: float) -> str:
    """Format with three significant digits and no exponent: `0.0123`, `1.20`, `123`."""
    rough = float(f"{value:.3g}")
    if rough == 0:
        return "0"
    return f"{rough:.{max(0, 2 - math.floor(math.log10(abs(rough))))}f}"
