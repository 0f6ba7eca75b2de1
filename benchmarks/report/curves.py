"""The charts with two axes: speed over size, predictions, scaling, rooflines.

`bars.py` has those that are rows of bars. Source of the roofline: Williams, Waterman, Patterson 2009,
"Roofline: An Insightful Visual Performance Model for Multicore Architectures".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.benchmarks.harness import formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figures import (
    GRID,
    INK,
    LIMIT,
    MUTED,
    PEER,
    End,
    Plot,
    color,
    figure,
    name_ends,
    plain_number,
    powers_of_two,
    round_ticks,
    spread,
)
from minidist.benchmarks.report.tables import Section
from minidist.kernels.measure.points import intensity

KINDS = ("float32", "tf32", "float16", "bfloat16", "float64")  # each has a colour
SCALING = {
    "strong": (
        "times the speed of one rank",
        "One batch over more ranks, one thread each: on the dashed line, N ranks are N times as fast.",
    ),
    "weak": (
        "speed per rank, relative to one rank",
        "The same number of rows on every rank, one thread each: the dashed line loses nothing.",
    ),
}


def of_section(section: Section) -> Plot | None:
    """Draw a section's predictions, or its curves of speed over size; None if it has neither."""
    if predicted := [entry for entry in section.entries if "predicted" in entry["extra_info"]]:
        return _predictions(predicted)
    keys = {"series", "size", "gflops"}
    curves = [entry for entry in section.entries if keys <= entry["extra_info"].keys()]
    return _curves(section, curves) if curves else None


def _curves(section: Section, entries: list[Entry]) -> Plot:
    """Draw GFLOP/s over the size, both logarithmic: a line for each series, and one for the peer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    peer: dict[int, float] = {}
    for entry in entries:
        extra = entry["extra_info"]
        lines.setdefault(extra["series"], []).append((extra["size"], extra["gflops"]))
        if "peer_gflops" in extra:
            peer[extra["size"]] = max(extra["peer_gflops"], peer.get(extra["size"], 0.0))
    drawn, axes = figure(3.6)
    ends: list[End] = []
    for index, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=color(index))
        ends.append((xs[-1], ys[-1], name, color(index)))
    if peer:
        xs, ys = zip(*sorted(peer.items()), strict=True)
        axes.plot(xs, ys, marker="s", markersize=4, linewidth=2, linestyle="--", color=PEER)
        ends.append((xs[-1], ys[-1], section.peer or "peer", PEER))
    axes.set_yscale("log")
    powers_of_two(axes, sorted({entry["extra_info"]["size"] for entry in entries}))
    axes.set_yticks(round_ticks(*axes.get_ylim()))
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.42)  # room for the names at the lines' ends
    axes.yaxis.set_major_formatter(plain_number)
    axes.set_xlabel("rows and columns of each matrix")
    axes.set_ylabel("GFLOP/s")
    name_ends(axes, ends)
    best = "; ".join(
        f"{name} reaches {formats.number(max(rate for _, rate in points))}" for name, points in lines.items()
    )
    reached = f", {section.peer or 'the peer'} {formats.number(max(peer.values()))}" if peer else ""
    return Plot(
        drawn,
        f"Curves of GFLOP/s over the size of the matrices. {best}{reached}.",
        "Speed over size, both on logarithmic scales; higher is better.",
    )


def _predictions(entries: list[Entry]) -> Plot:
    """Draw seconds over bytes, both logarithmic: a dot for each measurement, and dashed predictions."""
    series: dict[str, list[tuple[int, float, float]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        point = extra["bytes"], entry["stats"]["median"], extra["predicted"]
        series.setdefault(extra["series"], []).append(point)
    drawn, axes = figure(4.2)
    ends: list[End] = []
    for index, (name, points) in enumerate(series.items()):
        sizes, measured, expected = zip(*sorted(points), strict=True)
        axes.plot(sizes, measured, marker="o", markersize=5, linewidth=0, color=color(index))
        axes.plot(sizes, expected, linewidth=1.5, linestyle="--", color=color(index))
        ends.append((sizes[-1], measured[-1], name, color(index)))
    axes.set_yscale("log")
    powers_of_two(axes, sorted({entry["extra_info"]["bytes"] for entry in entries})[::2], formats.binary_size)
    axes.set_yticks(round_ticks(*axes.get_ylim()))
    axes.yaxis.set_major_formatter(lambda value, _: formats.seconds(value))
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.3)  # room for the names
    axes.set_xlabel("bytes of the tensor")
    name_ends(axes, ends)
    error = max(entry["extra_info"]["median_error"] for entry in entries)
    return Plot(
        drawn,
        f"Time of an all-reduce over its size, measured and predicted, by {', '.join(series)}.",
        f"Dots are measured, lines predicted; lower is better. Median error {100 * error:.0f}%.",
    )


def scaling(entries: Sequence[Entry], kind: str, cores: int) -> Plot | None:
    """Draw strong or weak scaling: speed over the number of ranks, and the ideal as a dashed line.

    Each series has a line. Returns None if scaling was not measured.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if extra.get("scaling") == kind and "efficiency" in extra:
            ranks = extra["size"]
            gained = extra["efficiency"] * (ranks if kind == "strong" else 1)
            series.setdefault(str(extra["series"]), []).append((ranks, gained))
    sizes = sorted({ranks for points in series.values() for ranks, _ in points} | {1})
    if len(sizes) < 2:
        return None
    drawn, axes = figure(3.3)
    last = sizes[-1]
    ideal = [float(size) if kind == "strong" else 1.0 for size in sizes]
    axes.plot(sizes, ideal, **LIMIT)
    ends: list[End] = [(last, ideal[-1], "ideal", INK)]
    for index, (name, points) in enumerate(series.items()):
        xs, ys = zip(*sorted({1: 1.0, **dict(points)}.items()), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=color(index))
        ends.append((last, ys[-1], name, color(index)))
    powers_of_two(axes, sizes)
    high = 1.08 * max(max(ideal), *(y for points in series.values() for _, y in points))
    axes.set_ylim(0, high)
    axes.set_xlim(0.93, last * last**0.75)  # room for names
    if cores < last:
        axes.axvspan(cores, last, color=MUTED, alpha=0.12, linewidth=0)
        words = f"more ranks than {cores} cores"
        axes.text(last * 0.97, 0.02 * high, words, ha="right", fontsize=9.5, color=MUTED)
    axes.set_xlabel("ranks")
    words, caption = SCALING[kind]
    axes.set_ylabel(words)
    name_ends(axes, ends, 0.075, log=False, fontsize=10)
    told = "; ".join(f"{name} {max(points)[1]:.2f} at {max(points)[0]}" for name, points in series.items())
    return Plot(
        drawn,
        f"{kind.capitalize()} scaling over {sizes[0]} to {last} ranks, {words}: {told}; ideal {ideal[-1]:g}.",
        caption,
    )


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


def kind_color(kind: str | None) -> str:
    """Return the colour of an arithmetic."""
    return MUTED if kind is None else color(KINDS.index(kind))


def roofline(
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
        axes.plot([start, right], [peak, peak], color=kind_color(kind), linewidth=1.5)
        ends.append((right, peak, f"{formats.kind_name(kind)} peak {formats.number(peak)}", kind_color(kind)))
    if slope:
        axes.plot([left, highest / slope], [left * slope, highest], color=MUTED, linewidth=1.5)
        words = f"{formats.number(slope)} GB/s"
        axes.text(0.7 * highest / slope, highest, words, ha="right", fontsize=10, color=MUTED)
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
        axes.annotate(name, (right * 1.6, height), va="center", color=shade, fontsize=10)
    told = "; ".join(
        f"{line.name} {formats.number(line.figures[-1]['gflops'])} of {formats.number(peaks[line.dtype])}"
        for line in lines
    )
    alt = f"A roofline of {device}: GFLOP/s over arithmetic intensity. At the largest n {told} GFLOP/s."
    return Plot(drawn, alt, caption)
