"""The figure of a section of results.

The entries decide what is drawn: predictions as dots and lines; `series` and `size` as curves; goals as
shares of their limits; peers as pairs of bars, or if there are many, as bars of their shares.
"""

from __future__ import annotations

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figures import (
    BAD,
    GOOD,
    INK,
    LIMIT,
    PEER,
    End,
    Plot,
    after,
    color,
    figure,
    name_ends,
    plain_number,
    powers_of_two,
    round_ticks,
    rows_down,
    shares,
)
from minidist.benchmarks.report.sections import Section

MOST_PAIRS = 12  # with more rows, draw one bar each, for the share of the peer's speed


def plot(section: Section) -> Plot | None:
    """Draw a section, or return None if it compares nothing."""
    curves = [
        entry for entry in section.entries if {"series", "size", "gflops"} <= entry["extra_info"].keys()
    ]
    predicted = [entry for entry in section.entries if "predicted" in entry["extra_info"]]
    judged = [entry for entry in section.entries if columns.goal(entry)]
    paired = [entry for entry in section.entries if "peer" in entry["extra_info"]]
    if predicted:
        return _predictions(predicted)
    if curves:
        return _curves(section, curves)
    if judged:
        return _goals(judged)
    if len(paired) > MOST_PAIRS and all("percent_of_peer" in entry["extra_info"] for entry in paired):
        return _shares(section, paired)
    return _pairs(paired) if paired else None


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


def _goals(entries: list[Entry]) -> Plot:
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
    axes.axvline(1.0, **LIMIT)
    axes.set_xlim(0, max(1.15, *axes.get_xlim()) * 1.12)
    rows_down(axes, len(entries), "share of the limit", top=-0.5)
    return Plot(
        drawn,
        f"Bars with a limit at 1: {'; '.join(told)}.",
        "Goals: a bar that ends left of the line has met its goal.",
    )


def _pairs(entries: list[Entry]) -> Plot:
    """Draw our time and the peer's, row by row."""
    drawn, axes = figure(0.8 + 0.75 * len(entries))
    longest = max(max(each["stats"]["median"], each["extra_info"]["peer_median"]) for each in entries)
    unit, scale = formats.unit_of_seconds(longest)
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
    rows_down(axes, len(entries), unit, bottom=-0.45)
    return Plot(
        drawn,
        f"Bars of times: {'; '.join(told)}.",
        "Median times, measured in turns; shorter is better.",
    )


def _shares(section: Section, entries: list[Entry]) -> Plot:
    """Draw our rate as a share of the peer's, a bar for each row."""
    kinds = list(dict.fromkeys(entry["extra_info"].get("dtype") for entry in entries))
    rows = []
    for entry in entries:
        percent, index = entry["extra_info"]["percent_of_peer"], kinds.index(entry["extra_info"].get("dtype"))
        rows.append((columns.label(entry), percent, f"{formats.number(percent)}%", color(index)))
    peer = section.peer or "the peer"
    caption = f"Share of {peer}'s speed; at the line both are equally fast."
    return shares(rows, f"{peer}'s speed", caption)
