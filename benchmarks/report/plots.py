"""The figure of a section of results, as SVG that takes its colours from the page.

The entries decide what is drawn: predictions as dots and lines; `series` and `size` as curves; goals as
shares of their limits; peers as pairs of bars, or if there are many, as bars of their shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figure_style import (
    BAD,
    GOOD,
    INK,
    PEER,
    after,
    apart,
    color,
    figure,
    shares,
    svg,
)
from minidist.benchmarks.report.report import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PAIRS = 12  # with more rows, draw one bar each, for the share of the peer's speed


@dataclass(frozen=True)
class Plot:
    """A figure: its SVG, a description for readers who can't see it, and its caption."""

    svg: str
    alt: str
    caption: str


def plot(section: Section, name: str) -> Plot | None:
    """Draw a section, or return None if it compares nothing. `name` is unique on the page."""
    curves = [
        entry for entry in section.entries if {"series", "size", "gflops"} <= entry["extra_info"].keys()
    ]
    predicted = [entry for entry in section.entries if "predicted" in entry["extra_info"]]
    judged = [entry for entry in section.entries if columns.goal(entry)]
    paired = [entry for entry in section.entries if "peer" in entry["extra_info"]]
    if predicted:
        return _predictions(predicted, name)
    if curves:
        return _curves(section, curves, name)
    if judged:
        return _goals(judged, name)
    if len(paired) > MOST_PAIRS and all("percent_of_peer" in entry["extra_info"] for entry in paired):
        return _shares(section, paired, name)
    return _pairs(paired, name) if paired else None


def _curves(section: Section, entries: list[Entry], page_name: str) -> Plot:
    """Draw GFLOP/s over the size, both logarithmic: a line for each series, and one for the peer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    peer: dict[int, float] = {}
    for entry in entries:
        extra = entry["extra_info"]
        lines.setdefault(extra["series"], []).append((extra["size"], extra["gflops"]))
        if "peer_gflops" in extra:
            peer[extra["size"]] = max(extra["peer_gflops"], peer.get(extra["size"], 0.0))
    drawn, axes = figure(3.6)
    ends = []
    for index, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=color(index))
        ends.append((xs[-1], ys[-1], name, color(index)))
    if peer:
        xs, ys = zip(*sorted(peer.items()), strict=True)
        axes.plot(xs, ys, marker="s", markersize=4, linewidth=2, linestyle="--", color=PEER)
        ends.append((xs[-1], ys[-1], section.peer or "peer", PEER))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({entry["extra_info"]["size"] for entry in entries})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_yticks(_ticks(*axes.get_ylim()))
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.42)  # room for the names at the lines' ends
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlabel("rows and columns of each matrix")
    axes.set_ylabel("GFLOP/s")
    _name_ends(axes, ends)
    best = "; ".join(
        f"{name} reaches {formats.number(max(rate for _, rate in points))}" for name, points in lines.items()
    )
    reached = f", {section.peer or 'the peer'} {formats.number(max(peer.values()))}" if peer else ""
    return Plot(
        svg(drawn, page_name),
        f"Curves of GFLOP/s over the size of the matrices. {best}{reached}.",
        "Speed over size, both on logarithmic scales; higher is better.",
    )


def _predictions(entries: list[Entry], page_name: str) -> Plot:
    """Draw seconds over bytes, both logarithmic: a dot for each measurement, and dashed predictions."""
    series: dict[str, list[tuple[int, float, float]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        point = extra["bytes"], entry["stats"]["median"], extra["predicted"]
        series.setdefault(extra["series"], []).append(point)
    drawn, axes = figure(4.2)
    ends = []
    for index, (name, points) in enumerate(series.items()):
        sizes, measured, expected = zip(*sorted(points), strict=True)
        axes.plot(sizes, measured, marker="o", markersize=5, linewidth=0, color=color(index))
        axes.plot(sizes, expected, linewidth=1.5, linestyle="--", color=color(index))
        ends.append((sizes[-1], measured[-1], name, color(index)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({entry["extra_info"]["bytes"] for entry in entries})
    axes.set_xticks(ticks[::2], [formats.binary_size(size) for size in ticks[::2]])
    axes.minorticks_off()
    axes.set_yticks(_ticks(*axes.get_ylim()))
    axes.yaxis.set_major_formatter(lambda value, _: formats.seconds(value))
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.3)  # room for the names
    axes.set_xlabel("bytes of the tensor")
    _name_ends(axes, ends)
    error = max(entry["extra_info"]["median_error"] for entry in entries)
    return Plot(
        svg(drawn, page_name),
        f"Time of an all-reduce over its size, measured and predicted, by {', '.join(series)}.",
        f"Dots are measured, lines predicted; lower is better. Median error {100 * error:.0f}%.",
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return ticks for a logarithmic axis: powers of ten, with numbers in between if these are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) > 1:
            break
    return found


def _name_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its end, and move overlapping names apart, within the axes."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ends = sorted(ends, key=lambda end: end[1])
    heights = apart([math.log(y) for _, y, _, _ in ends], (high - low) * 0.065, high)
    offset: dict[str, Any] = {"xytext": (8, 0), "textcoords": "offset points"}
    for (x, _, name, shade), height in zip(ends, heights, strict=True):
        axes.annotate(name, (x, math.exp(height)), va="center", color=shade, fontsize=10, **offset)


def _goals(entries: list[Entry], page_name: str) -> Plot:
    """Draw measurements as shares of their limits, with a line at the limit."""
    drawn, axes = figure(0.8 + 0.6 * len(entries))
    told = []
    for row, entry in enumerate(entries):
        judged = columns.goal(entry)
        assert judged is not None
        value, limit, kept = judged
        share = max(0.0, value / limit)  # a difference may be below 0
        axes.barh(row + 0.18, share, height=0.36, color=GOOD if kept else BAD)
        axes.text(0, row - 0.22, columns.label(entry), va="center", fontsize=10, color=INK)
        after(axes, share, row + 0.18, f"{value / limit:.2f}")
        told.append(f"{columns.label(entry)} at {value / limit:.2f} times its limit")
    axes.axvline(1.0, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, max(1.15, *axes.get_xlim()) * 1.12)
    axes.set_ylim(len(entries) - 0.4, -0.5)
    axes.set_yticks([])
    axes.set_xlabel("share of the limit")
    return Plot(
        svg(drawn, page_name),
        f"Bars with a limit at 1: {'; '.join(told)}.",
        "Goals: a bar that ends left of the line has met its goal.",
    )


def _pairs(entries: list[Entry], page_name: str) -> Plot:
    """Draw our time and the peer's, row by row."""
    drawn, axes = figure(0.8 + 0.75 * len(entries))
    unit, scale = _unit(
        max(max(entry["stats"]["median"], entry["extra_info"]["peer_median"]) for entry in entries)
    )
    told = []
    for row, entry in enumerate(entries):
        extra = entry["extra_info"]
        ours, peer = entry["stats"]["median"], extra["peer_median"]
        axes.text(0, row - 0.34, columns.label(entry), va="center", fontsize=10, color=INK)
        for offset, value, shade, name in (
            (-0.04, ours, color(0), extra.get("program", "minidist")),
            (0.27, peer, PEER, extra["peer"]),
        ):
            axes.barh(row + offset, value * scale, height=0.28, color=shade)
            after(axes, value * scale, row + offset, f"{formats.seconds(value)}, {name}")
        told.append(
            f"{columns.label(entry)} {formats.seconds(ours)}, {extra['peer']} {formats.seconds(peer)}"
        )
    axes.set_xlim(0, axes.get_xlim()[1] * 1.5)  # room for the words after the bars
    axes.set_ylim(len(entries) - 0.45, -0.6)
    axes.set_yticks([])
    axes.set_xlabel(unit)
    return Plot(
        svg(drawn, page_name),
        f"Bars of times: {'; '.join(told)}.",
        "Median times, measured in turns; shorter is better.",
    )


def _shares(section: Section, entries: list[Entry], page_name: str) -> Plot:
    """Draw our rate as a share of the peer's, a bar for each row."""
    kinds = list(dict.fromkeys(entry["extra_info"].get("dtype") for entry in entries))
    rows = []
    for entry in entries:
        percent, index = entry["extra_info"]["percent_of_peer"], kinds.index(entry["extra_info"].get("dtype"))
        rows.append((columns.label(entry), percent, f"{formats.number(percent)}%", color(index)))
    peer = section.peer or "the peer"
    drawn, told = shares(rows, f"share of {peer}'s speed, percent")
    return Plot(
        svg(drawn, page_name),
        f"Bars with a line at 100 percent of {peer}'s speed: {told}.",
        f"Share of {peer}'s speed; at the line both are equally fast.",
    )


def _unit(longest: float) -> tuple[str, float]:
    """Return the unit for an axis of times, and the factor for seconds."""
    for limit, unit, scale in ((1e-3, "µs", 1e6), (1.0, "ms", 1e3)):
        if longest < limit:
            return unit, scale
    return "s", 1.0
