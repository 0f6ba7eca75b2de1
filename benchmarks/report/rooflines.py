"""Figures of the ladders: each rung's share of the library's speed, and the rungs below their roofline.

Source: Williams, Waterman, Patterson 2009, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures".
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
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
from minidist.benchmarks.report.ladders import NOTHING, CudaLadder, CudaRow
from minidist.kernels.measure.points import intensity

KINDS = ("float32", "tf32", "float16", "bfloat16", "float64")  # each has a colour


@dataclass(frozen=True)
class Line:
    """One product: its name, FLOP/byte and GFLOP/s at each size, and its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    shade: str


def cpu_rungs(entries: Sequence[Entry]) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of the ladder on one core by rung, each rung's in the order of size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if entry["suite"] == "bench_cpu_matmul" and {"series", "size", "gflops"} <= extra.keys():
            found.setdefault(extra["series"], []).append(extra)
    return {name: sorted(found[name], key=lambda extra: int(extra["size"])) for name in sorted(found)}


def cpu_bars(entries: Sequence[Entry]) -> Plot | None:
    """Draw a bar for each rung of the CPU ladder, at its largest size."""
    rows = []
    for index, (name, several) in enumerate(cpu_rungs(entries).items()):
        extra = several[-1]
        if "percent_of_peer" in extra:
            percent = extra["percent_of_peer"]
            text = f"{formats.number(percent)}%, n = {extra['size']:,}"
            rows.append((name, percent, text, color(index)))
            peer = extra["peer"]
    if not rows:
        return None
    drawn, told = shares(rows, f"share of {peer}'s speed, percent")
    return Plot(
        drawn,
        f"Bars with a line at 100 percent of {peer}'s speed: {told}.",
        f"Share of {peer}'s speed on one core in float32, at each rung's largest n; the line is {peer}.",
    )


def cpu_roofline(entries: Sequence[Entry], device: str) -> Plot | None:
    """Draw the CPU ladder's rungs on the roofline of one core, or return None if no peak was measured."""
    found = cpu_rungs(entries)
    measured = [extra for several in found.values() for extra in several]
    peaks = [
        100 * each["gflops"] / each["percent_of_peak"] for each in measured if each.get("percent_of_peak")
    ]
    if not peaks:
        return None
    peak = statistics.median(peaks)
    bandwidths = [extra["peak_gb_per_s"] for extra in measured if "peak_gb_per_s" in extra]
    lines = [
        Line(name, _points("float32", several), color(index))
        for index, (name, several) in enumerate(found.items())
    ]
    told = "; ".join(
        f"{name} {formats.number(several[-1]['gflops'])} of {formats.number(peak)}"
        for name, several in found.items()
    )
    slope = "its slope is the rate at which a core reads memory, and " if bandwidths else ""
    return _roofline(
        f"one core of {device}",
        lines,
        {"float32": peak},
        statistics.median(bandwidths) if bandwidths else None,
        told,
        f"The roofline of one core: {slope}its peak is the rate of fused multiply-adds. A point for each n.",
    )


def cuda_bars(ladder: CudaLadder) -> Plot:
    """Draw a bar for each rung and arithmetic of the CUDA ladder, at the size that most of them have."""
    common = ladder.common_size
    rows = []
    for row in ladder.rows:
        size = max((size for size in row.entries if size <= common), default=max(row.entries, default=0))
        percent = row.percent(size)
        text = NOTHING if percent is None else f"{formats.number(percent)}%"
        rows.append((row.name, percent, text if size in (0, common) else f"{text}, n = {size}", _shade(row)))
    drawn, told = shares(rows, "share of torch.matmul's speed, percent")
    return Plot(
        drawn,
        f"Bars with a line at 100 percent of torch.matmul's speed: {told}.",
        f"Share of torch.matmul's speed in the same arithmetic, at n = {common}; the line is torch.matmul.",
    )


def cuda_roofline(ladder: CudaLadder) -> Plot | None:
    """Draw the CUDA ladder's rungs on the GPU's roofline, or return None if no peak was measured."""
    rows = [row for row in ladder.rows if row.largest("peak_gflops")]
    if not rows:
        return None
    told = "; ".join(
        f"{row.name} {formats.number(row.largest('gflops') or 0.0)} of "
        f"{formats.number(row.largest('peak_gflops') or 0.0)}"
        for row in rows
    )
    return _roofline(
        ladder.device,
        [Line(row.name, _points(str(row.dtype), row.figures), _shade(row)) for row in rows],
        {str(row.dtype): row.largest("peak_gflops") or 0.0 for row in rows},
        max(row.largest("peak_gb_per_s") or 0.0 for row in rows),
        told,
        "The roofline: its slope is the rate of a copy within the GPU's memory, and each peak is the rate of "
        "the vendor's own product at its best. A point for each n.",
    )


def _points(dtype: str, several: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return FLOP/byte and GFLOP/s of square products."""
    return [(intensity(*(each["size"],) * 3, dtype), each["gflops"]) for each in several]


def _shade(row: CudaRow) -> str:
    return MUTED if row.dtype is None else _of_kind(row.dtype)


def _of_kind(kind: str) -> str:
    """Return the colour of an arithmetic."""
    return color(KINDS.index(kind))


def _roofline(
    device: str,
    lines: Sequence[Line],
    peaks: Mapping[str, float],
    bandwidth: float | None,
    told: str,
    caption: str,
) -> Plot:
    """Draw `lines` below the roofs.

    Args:
        device: the device with these roofs.
        lines: the products, one or more.
        peaks: GFLOP/s of each arithmetic.
        bandwidth: GB/s of the device's memory; None if it was not measured, and then there is no slope.
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
    ends: list[End] = []
    highest = max(peaks.values())
    for kind, peak in peaks.items():
        start = peak / slope if slope else left
        axes.plot([start, right], [peak, peak], color=_of_kind(kind), linewidth=1.5)
        ends.append((right, peak, f"{formats.kind_name(kind)} peak {formats.number(peak)}", _of_kind(kind)))
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
    return Plot(
        drawn,
        f"A roofline of {device}: GFLOP/s over arithmetic intensity. At the largest n {told} GFLOP/s.",
        caption,
    )
