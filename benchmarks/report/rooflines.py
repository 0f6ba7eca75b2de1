"""Figures of the ladders: each rung's share of the library's speed, and the rungs below their roofline.

Source: Williams, Waterman, Patterson 2009, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures".
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.benchmarks.harness import formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figures import (
    GRID,
    MUTED,
    End,
    Plot,
    color,
    figure,
    plain_number,
    shares,
    spread,
)
from minidist.benchmarks.report.ladders import NOTHING, CudaLadder
from minidist.kernels.measure.points import intensity

KINDS = ("float32", "tf32", "float16", "bfloat16", "float64")  # each has a colour


@dataclass(frozen=True)
class Line:
    """One product: its name, its arithmetic, its figures from the smallest n up, and its colour."""

    name: str
    dtype: str
    figures: Sequence[dict[str, Any]]
    shade: str
    stored: str = ""  # the dtype in memory, if another

    @property
    def points(self) -> list[tuple[float, float]]:
        """FLOP/byte and GFLOP/s at each n."""
        return [
            (intensity(*(each["size"],) * 3, self.stored or self.dtype), each["gflops"])
            for each in self.figures
        ]


def cpu_lines(entries: Sequence[Entry]) -> list[Line]:
    """Return the rungs of the CPU ladder on one core."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if entry["suite"] == "bench_cpu_matmul" and {"series", "size", "gflops"} <= extra.keys():
            found.setdefault(extra["series"], []).append(extra)
    lines = []
    for index, name in enumerate(sorted(found)):
        figures = sorted(found[name], key=lambda extra: int(extra["size"]))
        arithmetic = figures[0].get("arithmetic", "float32")  # of rung 8 on the CPU's matrix unit: bfloat16
        lines.append(Line(name, arithmetic, figures, color(index), "float32"))
    return lines


def cpu_bars(entries: Sequence[Entry]) -> Plot | None:
    """Draw a bar for each rung of the CPU ladder, at its largest n."""
    rows = []
    for line in cpu_lines(entries):
        extra = line.figures[-1]
        if "percent_of_peer" in extra:
            percent, peer = extra["percent_of_peer"], extra["peer"]
            rows.append(
                (line.name, percent, f"{formats.number(percent)}%, n = {extra['size']:,}", line.shade)
            )
    if not rows:
        return None
    caption = f"Share of {peer}'s speed on one core in float32, at each rung's largest n; the line is {peer}."
    return shares(rows, f"{peer}'s speed", caption)


def cpu_roofline(entries: Sequence[Entry], device: str) -> Plot | None:
    """Draw the CPU ladder's rungs on the roofline of one core, or return None if no peak was measured."""
    lines = cpu_lines(entries)
    measured = [extra for line in lines for extra in line.figures]
    peaks: dict[str, list[float]] = {}
    for line in lines:
        for each in line.figures:
            if each.get("percent_of_peak"):
                peaks.setdefault(line.dtype, []).append(100 * each["gflops"] / each["percent_of_peak"])
    if not peaks:
        return None
    lines = [line for line in lines if line.dtype in peaks]
    bandwidths = [extra["peak_gb_per_s"] for extra in measured if "peak_gb_per_s" in extra]
    slope = "its slope is the rate at which a core reads memory, and " if bandwidths else ""
    return _roofline(
        f"one core of {device}",
        lines,
        {kind: statistics.median(found) for kind, found in peaks.items()},
        statistics.median(bandwidths) if bandwidths else None,
        f"The roofline of one core: {slope}its peak is the rate of fused multiply-adds, or of the "
        "matrix unit's products in bf16. A point for each n.",
    )


def cuda_bars(ladder: CudaLadder) -> Plot:
    """Draw a bar for each rung and arithmetic of the CUDA ladder, at the size that most of them have."""
    common = ladder.common_size
    rows = []
    for row in ladder.rows:
        size = max((size for size in row.entries if size <= common), default=max(row.entries, default=0))
        percent = row.percent(size)
        text = NOTHING if percent is None else f"{formats.number(percent)}%"
        rows.append(
            (row.name, percent, text if size in (0, common) else f"{text}, n = {size}", _shade(row.dtype))
        )
    caption = (
        f"Share of torch.matmul's speed in the same arithmetic, at n = {common}; the line is torch.matmul."
    )
    return shares(rows, "torch.matmul's speed", caption)


def cuda_roofline(ladder: CudaLadder) -> Plot | None:
    """Draw the CUDA ladder's rungs on the GPU's roofline, or return None if no peak was measured."""
    rows = [row for row in ladder.rows if row.largest("peak_gflops")]
    if not rows:
        return None
    return _roofline(
        ladder.device,
        [Line(row.name, str(row.dtype), row.figures, _shade(row.dtype)) for row in rows],
        {str(row.dtype): row.largest("peak_gflops") or 0.0 for row in rows},
        max(row.largest("peak_gb_per_s") or 0.0 for row in rows),
        "The roofline: its slope is the rate of a copy within the GPU's memory, and each peak is the rate of "
        "the vendor's own product at its best. A point for each n.",
    )


def _shade(kind: str | None) -> str:
    """Return the colour of an arithmetic."""
    return MUTED if kind is None else color(KINDS.index(kind))


def _roofline(
    device: str, lines: Sequence[Line], peaks: Mapping[str, float], bandwidth: float | None, caption: str
) -> Plot:
    """Draw `lines` below the roofs.

    Args:
        device: the device with these roofs.
        lines: the products, one or more.
        peaks: GFLOP/s of each arithmetic.
        bandwidth: GB/s of the device's memory; None if it was not measured, and then there is no slope.
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
    ends: list[End] = []
    highest = max(peaks.values())
    for kind, peak in peaks.items():
        start = peak / slope if slope else left
        axes.plot([start, right], [peak, peak], color=_shade(kind), linewidth=1.5)
        ends.append((right, peak, f"{formats.kind_name(kind)} peak {formats.number(peak)}", _shade(kind)))
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
        axis.set_major_formatter(plain_number)
    axes.minorticks_off()
    # The names stand in a column on the right, each joined to its line by a thin one.
    for (x, y, name, shade), height in spread(ends, 0.95 / (len(ends) + 3), *axes.get_ylim()):
        axes.plot([x, right * 1.05, right * 1.5], [y, y, height], color=GRID, linewidth=0.8, zorder=1)
        axes.annotate(name, (right * 1.6, height), va="center", color=shade, fontsize=9)
    told = "; ".join(
        f"{line.name} {formats.number(line.figures[-1]['gflops'])} of {formats.number(peaks[line.dtype])}"
        for line in lines
    )
    alt = f"A roofline of {device}: GFLOP/s over arithmetic intensity. At the largest n {told} GFLOP/s."
    return Plot(drawn, alt, caption)
