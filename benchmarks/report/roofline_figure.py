"""Draw a roofline of measured peaks, with each product's rate over its arithmetic intensity.

Source: Williams, Waterman, Patterson 2009, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidist.benchmarks.harness import formats
from minidist.benchmarks.report.figure_style import GRID, MUTED, apart, color, figure, svg
from minidist.benchmarks.report.plots import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("float32", "tf32", "float16", "bfloat16", "float64")  # each has a colour


@dataclass(frozen=True)
class Line:
    """One product: its name, FLOP/byte and GFLOP/s at each size, and its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    shade: str


def color_of(kind: str) -> str:
    """Return the colour of an arithmetic."""
    return color(KINDS.index(kind))


def roofline(
    device: str,
    lines: Sequence[Line],
    peaks: Mapping[str, float],
    bandwidth: float | None,
    page_name: str,
    told: str,
    caption: str,
) -> Plot:
    """Draw `lines` below the roofs.

    Args:
        device: the device with these roofs.
        lines: the products, one or more.
        peaks: GFLOP/s of each arithmetic.
        bandwidth: GB/s of the device's memory; None if it was not measured, and then there is no slope.
        page_name: a name that is unique on the page.
        told: the products' rates, in words.
        caption: the text below the figure.
    """
    right = 1.3 * max(x for line in lines for x, _ in line.points)
    slope = bandwidth or 0.0
    left = (
        min(peaks.values()) / slope / 4 if slope else min(x for line in lines for x, _ in line.points) / 1.5
    )
    drawn, axes = figure(1.6 + 0.24 * (len(lines) + len(peaks)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends: list[tuple[float, float, str, str]] = []
    highest = max(peaks.values())
    for kind, peak in peaks.items():
        start = peak / slope if slope else left
        axes.plot([start, right], [peak, peak], color=color_of(kind), linewidth=1.5)
        ends.append((right, peak, f"{formats.kind_name(kind)} peak {formats.number(peak)}", color_of(kind)))
    if slope:
        axes.plot([left, highest / slope], [left * slope, highest], color=MUTED, linewidth=1.5)
        words = f"{formats.number(slope)} GB/s"
        axes.text(0.7 * highest / slope, highest, words, ha="right", fontsize=9, color=MUTED)
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, marker="o", markersize=3.5, linewidth=1, color=line.shade)
        ends.append((xs[-1], ys[-1], line.name, line.shade))
    lowest = min(y for line in lines for _, y in line.points)
    axes.set_ylim(min(lowest, left * slope if slope else lowest) / 1.5, 1.6 * highest)
    axes.set_xlim(left, right * (right / left) ** 0.75)  # room for names
    axes.set_xticks([tick for tick in (1, 10, 100, 1000, 10_000, 100_000) if left < tick < right])
    axes.set_xlabel("arithmetic intensity, FLOP/byte")
    axes.set_ylabel("GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.minorticks_off()
    _name_lines(axes, ends, right)
    return Plot(
        svg(drawn, page_name),
        f"A roofline of {device}: GFLOP/s over arithmetic intensity. At the largest n {told} GFLOP/s.",
        caption,
    )


def _name_lines(axes: Axes, ends: list[tuple[float, float, str, str]], right: float) -> None:
    """Write the lines' names in a column on the right, each joined to its line by a thin one."""
    ends = sorted(ends, key=lambda end: end[1])
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = apart([math.log(y) for _, y, _, _ in ends], 0.95 * (high - low) / (len(ends) + 3), high)
    for (x, y, name, shade), height in zip(ends, heights, strict=True):
        axes.plot(
            [x, right * 1.05, right * 1.5], [y, y, math.exp(height)], color=GRID, linewidth=0.8, zorder=1
        )
        axes.annotate(name, (right * 1.6, math.exp(height)), va="center", color=shade, fontsize=9)
