"""The report's figures, as SVG that takes its colours from the page and so is right on light and on dark.

A section's entries decide what is drawn: curves over a size where entries have `series` and `size`, shares
of the limit where they have a goal, pairs of bars where they have a peer. Figures are narrow, so that on a
phone their letters stay readable.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist.benchmarks import columns
from minidist.benchmarks.columns import Entry
from minidist.benchmarks.report import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.6  # inches; 10 pt letters are then 11 px high on a screen of 390 px
SERIES = 8  # colours of series that the page defines, --series-0 to --series-7
# matplotlib wants colours, the page has variables: each stands for one of these until the SVG is written.
INK, MUTED, GRID, PEER, GOOD, BAD = (f"#0000f{index}" for index in range(6))
STAND_INS = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PEER: "--peer", GOOD: "--good", BAD: "--bad"}
STAND_INS |= {f"#0001f{index}": f"--series-{index}" for index in range(SERIES)}


@dataclass(frozen=True)
class Plot:
    """A figure: its SVG, what it shows in words for those who can't see it, and the line under it."""

    svg: str
    alt: str
    caption: str


def plot(section: Section, name: str) -> Plot | None:
    """What there is to draw of a section, None where nothing compares. `name` is unique on the page."""
    curves = [
        entry for entry in section.entries if {"series", "size", "gflops"} <= entry["extra_info"].keys()
    ]
    judged = [entry for entry in section.entries if columns.goal(entry)]
    paired = [entry for entry in section.entries if "peer" in entry["extra_info"]]
    if curves:
        return _curves(section, curves, name)
    if judged:
        return _goals(judged, name)
    return _pairs(paired, name) if paired else None


def _color(index: int) -> str:
    return f"#0001f{index % SERIES}"


def _curves(section: Section, entries: list[Entry], page_name: str) -> Plot:
    """GFLOP/s over the size, both logarithmic: a line for each series, and one for the peer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    peer: dict[int, float] = {}
    for entry in entries:
        extra = entry["extra_info"]
        lines.setdefault(extra["series"], []).append((extra["size"], extra["gflops"]))
        if "peer_gflops" in extra:
            peer[extra["size"]] = max(extra["peer_gflops"], peer.get(extra["size"], 0.0))
    figure, axes = _figure(3.6)
    ends = []
    for index, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=_color(index))
        ends.append((xs[-1], ys[-1], name, _color(index)))
    if peer:
        xs, ys = zip(*sorted(peer.items()), strict=True)
        axes.plot(xs, ys, marker="s", markersize=4, linewidth=2, linestyle="--", color=PEER)
        ends.append((xs[-1], ys[-1], section.peer or "peer", PEER))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({entry["extra_info"]["size"] for entry in entries})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.42)  # room for the names at the lines' ends
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("rows and columns of each matrix")
    axes.set_ylabel("GFLOP/s")
    _name_ends(axes, ends)
    best = "; ".join(
        f"{name} reaches {columns.number(max(rate for _, rate in points))}" for name, points in lines.items()
    )
    beside = f", {section.peer or 'the peer'} {columns.number(max(peer.values()))}" if peer else ""
    return Plot(
        _svg(figure, page_name),
        f"Curves of GFLOP/s over the size of the matrices. {best}{beside}.",
        "Speed over size, both on logarithmic scales; higher is better.",
    )


def _name_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its end; names that would lie on each other move apart, within the axes."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    gap = (high - low) * 0.065
    ends = sorted(ends, key=lambda end: end[1])
    heights = [math.log(y) for _, y, _, _ in ends]
    for below in range(len(ends) - 1):
        heights[below + 1] = max(heights[below + 1], heights[below] + gap)
    ceiling = high
    for index in reversed(range(len(ends))):
        heights[index] = min(heights[index], ceiling)
        ceiling = heights[index] - gap
    beside: dict[str, Any] = {"xytext": (8, 0), "textcoords": "offset points"}
    for (x, _, name, color), height in zip(ends, heights, strict=True):
        axes.annotate(name, (x, math.exp(height)), va="center", color=color, fontsize=10, **beside)


def _goals(entries: list[Entry], page_name: str) -> Plot:
    """What was measured as a share of the limit; the line is the limit."""
    figure, axes = _figure(0.8 + 0.6 * len(entries))
    told = []
    for row, entry in enumerate(entries):
        judged = columns.goal(entry)
        assert judged is not None
        value, limit, kept = judged
        axes.barh(row + 0.18, value / limit, height=0.36, color=GOOD if kept else BAD)
        axes.text(0, row - 0.22, columns.label(entry), va="center", fontsize=10, color=INK)
        _after(axes, value / limit, row + 0.18, f"{value / limit:.2f}")
        told.append(f"{columns.label(entry)} at {value / limit:.2f} of its limit")
    axes.axvline(1.0, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, max(1.15, *axes.get_xlim()) * 1.12)
    axes.set_ylim(len(entries) - 0.4, -0.5)
    axes.set_yticks([])
    axes.set_xlabel("share of the limit")
    return Plot(
        _svg(figure, page_name),
        f"Bars beside a limit of 1: {'; '.join(told)}.",
        "Goals: what is left of the line is met.",
    )


def _pairs(entries: list[Entry], page_name: str) -> Plot:
    """Our time and the peer's, row by row."""
    figure, axes = _figure(0.8 + 0.75 * len(entries))
    unit, scale = _unit(
        max(max(entry["stats"]["median"], entry["extra_info"]["peer_median"]) for entry in entries)
    )
    told = []
    for row, entry in enumerate(entries):
        extra = entry["extra_info"]
        ours, peer = entry["stats"]["median"], extra["peer_median"]
        axes.text(0, row - 0.34, columns.label(entry), va="center", fontsize=10, color=INK)
        for offset, value, color, name in (
            (-0.04, ours, _color(0), extra.get("program", "minidist")),
            (0.27, peer, PEER, extra["peer"]),
        ):
            axes.barh(row + offset, value * scale, height=0.28, color=color)
            _after(axes, value * scale, row + offset, f"{columns.seconds(value)}, {name}")
        told.append(
            f"{columns.label(entry)} {columns.seconds(ours)}, {extra['peer']} {columns.seconds(peer)}"
        )
    axes.set_xlim(0, axes.get_xlim()[1] * 1.5)  # room for the words after the bars
    axes.set_ylim(len(entries) - 0.45, -0.6)
    axes.set_yticks([])
    axes.set_xlabel(unit)
    return Plot(
        _svg(figure, page_name),
        f"Bars of times: {'; '.join(told)}.",
        "Median times in turn; shorter is better.",
    )


def _after(axes: Axes, x: float, y: float, text: str) -> None:
    """Write what a bar stands for after its end."""
    axes.annotate(
        text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, color=MUTED
    )


def _unit(longest: float) -> tuple[str, float]:
    """The unit for an axis of times, and what seconds are multiplied by."""
    for limit, unit, scale in ((1e-3, "µs", 1e6), (1.0, "ms", 1e3)):
        if longest < limit:
            return unit, scale
    return "s", 1.0


def _figure(height: float) -> tuple[Figure, Axes]:
    """An empty figure, on a transparent ground, in stand-in colours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element in the page's colours and font, its ids its own, its size not fixed."""
    import matplotlib as mpl

    text = io.StringIO()
    # Text stays text, so that it can be read aloud, searched and take the page's font.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minidist"}):
        figure.savefig(
            text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for stand_in, variable in STAND_INS.items():
        svg = svg.replace(stand_in, f"var({variable})")
    # Several figures share one page: what nothing refers to needs no id, and what remains is made unique.
    used = set(re.findall(r"#([\w.-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg)
    return re.sub(r"#(?=[\w.-]+[\")])", f"#{name}-", svg)
