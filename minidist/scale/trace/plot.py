"""A trace as a Gantt chart: a row for each rank, white where it waits for other ranks.

The wide bar shows the rank's state. Its labels are a pipeline's passes and micro-batches: F0 is the forward
pass of the first micro-batch, B0 its backward pass, or I0 and W0 the backward pass in two parts, for inputs
and weights. Narrow bars are collectives in the background, and arrows are messages.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from minidist.parallel.schedules.instructions import COMPUTE
from minidist.scale.trace.all_ranks import STATES, AllRanks, RankTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "forward": "#56B4E9",
    "recompute": "#F0E442",
    "backward": "#E69F00",
    "backward_weight": "#009E73",
    "optimizer": "#CC79A7",
    "other": "#BBBBBB",
    "communication": "#0072B2",
    "idle": "#FFFFFF",
}
"""Okabe and Ito's colours, which people with any colour vision can tell apart; as in schedules/."""
LABELS = {
    "recompute": "forward, recomputed",
    "backward_weight": "backward, weights",
    "other": "other work: loss, buckets, Python",
    "communication": "communication; narrow bars: in the background",
    "idle": "idle: waits for another rank",
}
ARROWS = 400
"""More arrows are not drawn, since they would hide the rest."""
LETTER = 0.0075
"""A letter's width as a share of the axis; a label that does not fit is left out."""


def plot(trace: AllRanks, path: str | PathLike[str] | None = None) -> Axes:
    """Draw each rank's states over ms; `Trace.plot` documents arguments and errors."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'minidist[bench]'") from error
    if path is not None and not isinstance(path, str | PathLike):
        raise TypeError(f"path is {path!r}; give the name of a file to write, such as 'trace.svg'")
    figure = Figure(figsize=(11, 1.5 + 0.62 * len(trace.ranks)), layout="constrained")
    axes, drawn = figure.add_subplot(), set[str]()
    for rank in trace.ranks:
        drawn |= _rank(axes, trace, rank)
    if len(trace.arrows) <= ARROWS:
        for arrow in trace.arrows:
            edge = 0.32 if arrow.destination > arrow.source else -0.32  # of the bars
            begin = (arrow.sent.start - trace.start) * 1e3, arrow.source + edge
            end = (arrow.received.end - trace.start) * 1e3, arrow.destination - edge
            style = {"arrowstyle": "-|>", "color": "#444444", "linewidth": 0.5, "mutation_scale": 5}
            axes.annotate("", xy=end, xytext=begin, arrowprops={**style, "shrinkA": 0, "shrinkB": 0})
    handles = [
        Patch(facecolor=COLORS[state], edgecolor="#888888", linewidth=0.5, label=LABELS.get(state, state))
        for state in STATES
        if state in drawn
    ]
    columns = -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=8)
    places = ["".join(f" {axis}{at}" for axis, at in rank.place.items()) for rank in trace.ranks]
    axes.set(
        yticks=range(len(trace.ranks)),
        yticklabels=[f"rank {i}" + (at and f"\n{at[1:]}") for i, at in enumerate(places)],
        ylim=(len(trace.ranks) - 0.4, -0.55),
        xlim=(0, (trace.end - trace.start) * 1e3),
        xlabel="ms" + (f", {trace.layout}" if trace.layout else ""),
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shares = axes.secondary_yaxis("right")
    computing = [f"{trace.shares(rank)['compute']:.0%} compute" for rank in range(len(trace.ranks))]
    shares.set_yticks(range(len(trace.ranks)), computing, fontsize=8)
    shares.spines["right"].set_visible(False)
    shares.tick_params(length=0)
    if path is not None:
        figure.savefig(path, dpi=150)
    return axes


def _rank(axes: Axes, trace: AllRanks, rank: RankTrace) -> set[str]:
    """Draw one rank's bars; returns the states in them."""
    bar, whole = (rank.rank - 0.32, 0.64), (trace.end - trace.start) * 1e3
    spans: dict[str, list[tuple[float, float]]] = {}
    for state, start, end in trace.timelines[rank.rank]:
        spans.setdefault(state, []).append(((start - trace.start) * 1e3, (end - start) * 1e3))
    for state in (each for each in STATES if each in spans and each != "idle"):
        axes.broken_barh(spans[state], bar, facecolors=COLORS[state], linewidth=0)
    axes.broken_barh([(0, whole)], bar, facecolors="none", edgecolors="#CCCCCC", linewidth=0.5)
    # A labelled box for each pass of a pipeline's schedule.
    chunks = any(each.args["chunk"] for each in rank.instructions)
    for each in (each for each in rank.instructions if each.args["kind"] in COMPUTE):
        start, width = (each.start - trace.start) * 1e3, (each.end - each.start) * 1e3
        axes.broken_barh([(start, width)], bar, facecolors="none", edgecolors="black", linewidth=0.6)
        text = each.name.partition(" ")[0] + (f"\nc{each.args['chunk']}" if chunks else "")
        if width > max(map(len, text.split("\n"))) * LETTER * whole:
            axes.text(start + width / 2, rank.rank, text, ha="center", va="center", fontsize=7, clip_on=True)
    # A narrow bar for each lane of collectives in the background.
    lanes: dict[str, list[tuple[float, float]]] = {}
    for each in (each for each in rank.slices if not each.on_thread and each.kind == "collective"):
        span = (each.start - trace.start) * 1e3, (each.end - each.start) * 1e3
        lanes.setdefault(each.lane, []).append(span)
    height = 0.14 / max(len(lanes), 1)
    for index, lane in enumerate(sorted(lanes, key=lambda lane: (len(lane), lane))):
        below = rank.rank + 0.35 + index * height, 0.9 * height
        axes.broken_barh(lanes[lane], below, facecolors=COLORS["communication"], linewidth=0)
    return {*spans, *(["communication"] if lanes else [])}
