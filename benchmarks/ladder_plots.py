"""Figures of the CUDA ladder: each rung's share of torch.matmul's speed, and its place on the roofline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minidist.benchmarks import columns
from minidist.benchmarks.drawing import GRID, MUTED, apart, color, figure, shares, svg
from minidist.benchmarks.ladder import NOTHING, Ladder, Row
from minidist.benchmarks.plots import Plot
from minidist.kernels.points import intensity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("float32", "tf32", "float16", "bfloat16", "float64")  # each has a colour


def bars(ladder: Ladder, page_name: str) -> Plot:
    """A bar for each rung and arithmetic, at the size that most of them have."""
    common = ladder.common_size
    rows = []
    for row in ladder.rows:
        size = max((size for size in row.entries if size <= common), default=max(row.entries, default=0))
        percent = row.percent(size)
        text = NOTHING if percent is None else f"{columns.number(percent)}%"
        rows.append((row.name, percent, text if size in (0, common) else f"{text}, n = {size}", _color(row)))
    drawn, told = shares(rows, "share of torch.matmul's speed, percent")
    return Plot(
        svg(drawn, page_name),
        f"Bars beside a line at 100 percent of torch.matmul's speed: {told}.",
        f"Share of torch.matmul's speed in the same arithmetic, at n = {common}; the line is as fast.",
    )


def roofline(ladder: Ladder, page_name: str) -> Plot | None:
    """The rungs' rates over their intensity, below what the GPU allows; None where no peak was measured."""
    rows = [row for row in ladder.rows if row.largest("peak_gflops")]
    if not rows:
        return None
    peaks = {str(row.dtype): row.largest("peak_gflops") or 0.0 for row in rows}
    slope = max(row.largest("peak_gb_per_s") or 0.0 for row in rows)
    points = {row.name: _points(row) for row in rows}
    right = 1.3 * max(x for line in points.values() for x, _ in line)
    left = min(peaks.values()) / slope / 4
    drawn, axes = figure(1.6 + 0.24 * (len(rows) + len(peaks)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends: list[tuple[float, float, str, str]] = []
    for kind, peak in peaks.items():
        axes.plot([peak / slope, right], [peak, peak], color=color(KINDS.index(kind)), linewidth=1.5)
        ends.append((right, peak, f"{columns.kind_name(kind)} peak {columns.number(peak)}", _color_of(kind)))
    highest = max(peaks.values())
    axes.plot([left, highest / slope], [left * slope, highest], color=MUTED, linewidth=1.5)
    axes.text(
        0.7 * highest / slope, highest, f"{columns.number(slope)} GB/s", ha="right", fontsize=9, color=MUTED
    )
    for row in rows:
        xs, ys = zip(*points[row.name], strict=True)
        axes.plot(xs, ys, marker="o", markersize=3.5, linewidth=1, color=_color(row))
        ends.append((xs[-1], ys[-1], row.name, _color(row)))
    lowest = min(y for line in points.values() for _, y in line)
    axes.set_ylim(min(lowest, left * slope) / 1.5, 1.6 * highest)
    axes.set_xlim(left, right * (right / left) ** 0.75)  # room for names
    axes.set_xticks([tick for tick in (1, 10, 100, 1000, 10_000, 100_000) if left < tick < right])
    axes.set_xlabel("arithmetic intensity, FLOP/byte")
    axes.set_ylabel("GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.minorticks_off()
    _name_beside(axes, ends, right)
    told = "; ".join(
        f"{row.name} {columns.number(row.largest('gflops') or 0.0)} of "
        f"{columns.number(row.largest('peak_gflops') or 0.0)}"
        for row in rows
    )
    return Plot(
        svg(drawn, page_name),
        f"A roofline of {ladder.device}: GFLOP/s over arithmetic intensity. At the largest n {told} GFLOP/s.",
        "The roofline: its slope is the rate of a copy within the GPU's memory, a peak that of the vendor's "
        "own product at its best. A point for each n.",
    )


def _points(row: Row) -> list[tuple[float, float]]:
    """FLOP/byte and GFLOP/s at each size."""
    return [
        (intensity(size, size, size, str(row.dtype)), entry["extra_info"]["gflops"])
        for size, entry in sorted(row.entries.items())
    ]


def _name_beside(axes: Axes, ends: list[tuple[float, float, str, str]], right: float) -> None:
    """Write names in a column beside what they name, each joined to it by a thin line."""
    ends = sorted(ends, key=lambda end: end[1])
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = apart([math.log(y) for _, y, _, _ in ends], 0.95 * (high - low) / (len(ends) + 3), high)
    for (x, y, name, shade), height in zip(ends, heights, strict=True):
        axes.plot(
            [x, right * 1.05, right * 1.5], [y, y, math.exp(height)], color=GRID, linewidth=0.8, zorder=1
        )
        axes.annotate(name, (right * 1.6, math.exp(height)), va="center", color=shade, fontsize=9)


def _color(row: Row) -> str:
    return MUTED if row.dtype is None else _color_of(row.dtype)


def _color_of(kind: str) -> str:
    return color(KINDS.index(kind))
