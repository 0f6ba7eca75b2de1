"""The figures that chapters open with: comparisons, memory, scaling, collectives, lessons.

`plots.py` has those of single sections, `rooflines.py` the ladders', and `gantt.py` the pipelines'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report import verdicts
from minidist.benchmarks.report.figures import (
    BAD,
    CARD,
    GOOD,
    INK,
    LIMIT,
    MUTED,
    End,
    Plot,
    after,
    color,
    figure,
    legend,
    name_ends,
    powers_of_two,
    rows_down,
    shares,
)

SHADES = {"faster": GOOD, "slower": BAD, "undecided": MUTED}
MARKS = {"faster": "o", "slower": "D", "undecided": "s"}
PARTS = {
    "parameters": color(0),
    "gradients": color(1),
    "optimizer": color(2),
    "activations": color(3),
    "buffers": color(5),
    "transient": MUTED,
}
LEAST = 0.13  # share of the axis; a shorter part of the memory has no room for its number
SCALING = {
    "strong": (
        "times the speed of one rank",
        "One batch divided over more ranks: on the dashed line, N ranks are N times as fast.",
    ),
    "weak": (
        "speed per rank, relative to one rank",
        "The same number of rows on every rank: the dashed line loses nothing.",
    ),
}


def ratios(entries: Sequence[Entry]) -> Plot | None:
    """Draw all comparisons: a dot for our time over the peer's, and a bar for the middle half of the pairs.

    Returns None without comparisons.
    """
    paired = [entry for entry in entries if columns.verdict(entry) and verdicts.ratio(entry) < 100]
    paired.sort(key=verdicts.ratio)
    if not paired:
        return None
    alone = len({entry["group"] for entry in paired}) == 1
    name = columns.label if alone else verdicts.name
    drawn, axes = figure(0.7 + 0.42 * len(paired))
    told = []
    for row, entry in enumerate(paired):
        extra, verdict = entry["extra_info"], columns.verdict(entry) or ""
        ratio, q1, q3 = extra["ratio"], extra["pair_ratio_q1"], extra["pair_ratio_q3"]
        shade = SHADES[verdict]
        axes.plot([q1, q3], [row + 0.15] * 2, color=shade, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot([ratio], [row + 0.15], marker=MARKS[verdict], markersize=5, color=shade)
        words = axes.annotate(
            label if "beside" in (label := name(entry)) else f"{label} – {extra['peer']}",
            (0, row - 0.27),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color=INK,
            bbox={"facecolor": CARD, "edgecolor": "none", "pad": 0.6},
        )
        words.set_in_layout(False)  # a long name may go past the axes
        told.append(f"{name(entry)} {verdicts.told(entry)}")
    axes.axvline(1.0, **LIMIT)
    axes.set_xlim(left=0)
    rows_down(axes, len(paired), "our time over the peer's")
    return Plot(
        drawn,
        f"Ratios of times with a line at 1: {'; '.join(told)}.",
        "Each name is ours – the peer's. Left of the line we are faster. A bar is the middle half of the "
        "pairs' ratios; it is grey if the comparison is undecided.",
    )


def memory(rows: Sequence[tuple[str, Mapping[str, int]]], caption: str, limit: int | None = None) -> Plot:
    """Draw a stacked bar for each name, with its bytes by part; `limit` is the memory that is available."""
    drawn, axes = figure(0.9 + 0.5 * len(rows))
    most = max([*(sum(parts.values()) for _, parts in rows), limit or 0, 1])
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "B")) if most >= s)
    told = []
    for row, (name, parts) in enumerate(rows):
        whole = sum(parts.values())
        axes.text(0, row - 0.38, name, va="center", fontsize=10, color=INK)
        start, y = 0.0, row + 0.08
        for part, shade in PARTS.items():
            length = parts.get(part, 0) / scale
            if length:
                axes.barh(y, length, left=start, height=0.5, color=shade, edgecolor=CARD, linewidth=0.8)
                if length * scale > LEAST * most:
                    text, middle = formats.number(length), start + length / 2
                    axes.text(middle, y, text, ha="center", va="center", fontsize=8, color=CARD)
                start += length
        over = limit is not None and whole > limit
        after(axes, start, y, f"{formats.size(whole)}{', too much' if over else ''}")
        several = ", ".join(f"{part} {formats.size(parts[part])}" for part in PARTS if parts.get(part))
        told.append(f"{name} {formats.size(whole)} ({several})")
    if limit is not None:
        axes.axvline(limit / scale, **LIMIT)
    axes.set_xlim(0, most / scale * 1.32)
    rows_down(axes, len(rows), f"{unit} on the fullest rank", top=-0.7, bottom=-0.5)
    legend(drawn, {shade: part for part, shade in PARTS.items() if any(parts.get(part) for _, parts in rows)})
    line = f" with a line at {formats.size(limit)}" if limit else ""
    return Plot(drawn, f"Stacked bars of memory{line}: {'; '.join(told)}.", caption)


def measured_memory(entries: Sequence[Entry]) -> Plot | None:
    """Draw the counted memory of results, or return None without results."""
    rows = [(columns.label(entry), entry["extra_info"]["memory"]) for entry in entries]
    caption = "Counted bytes on the fullest rank after a step; shorter is better."
    return memory(rows, caption) if rows else None


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
        axes.text(last * 0.97, 0.02 * high, words, ha="right", fontsize=8.5, color=MUTED)
    axes.set_xlabel("ranks")
    words, caption = SCALING[kind]
    axes.set_ylabel(words)
    name_ends(axes, ends, 0.075, log=False, fontsize=9)
    told = "; ".join(f"{name} {max(points)[1]:.2f} at {max(points)[0]}" for name, points in series.items())
    return Plot(
        drawn,
        f"{kind.capitalize()} scaling over {sizes[0]} to {last} ranks, {words}: {told}; ideal {ideal[-1]:g}.",
        caption,
    )


def collectives(entries: Sequence[Entry]) -> dict[int, Plot]:
    """Draw collectives against a peer over the tensor's size.

    Returns a figure for each number of ranks with at least two measured sizes.
    """
    found: dict[int, dict[str, list[tuple[int, float, float, float]]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if verdicts.is_collective(entry):
            operation = columns.label(entry).partition(",")[0]
            point = extra["bytes"], extra["ratio"], extra["pair_ratio_q1"], extra["pair_ratio_q3"]
            found.setdefault(extra["ranks"], {}).setdefault(operation, []).append(point)
    return {
        ranks: _collectives(operations, ranks)
        for ranks, operations in sorted(found.items())
        if any(len(points) > 1 for points in operations.values())
    }


def _collectives(operations: dict[str, list[tuple[int, float, float, float]]], ranks: int) -> Plot:
    drawn, axes = figure(3.2 + 0.2 * len(operations))
    told = []
    for index, (operation, points) in enumerate(operations.items()):
        sizes, ratios, lows, highs = zip(*sorted(points), strict=True)
        axes.plot(sizes, ratios, marker="o", markersize=4, linewidth=1.6, color=color(index))
        axes.vlines(sizes, lows, highs, color=color(index), linewidth=3, alpha=0.35)
        told.append(f"{operation} {min(ratios):.2f} to {max(ratios):.2f}")
    axes.axhline(1.0, **LIMIT)
    ticks = sorted({size for points in operations.values() for size, *_ in points})
    powers_of_two(axes, ticks[::2], formats.binary_size)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of the tensor")
    axes.set_ylabel("our time over the peer's")
    legend(drawn, {color(index): name for index, name in enumerate(operations)}, columns=1)
    return Plot(
        drawn,
        f"Ratios of times over the size on {ranks} ranks, with a line at 1: {'; '.join(told)}.",
        "Below the line we are faster. A bar is the middle half of the pairs' ratios.",
    )


def lessons(entries: Sequence[Entry]) -> Plot | None:
    """Draw a bar for each exercise's solution that is not at par, or return None if all are.

    Most solutions meet par exactly, since par was set by them, and their bars would say nothing.
    """
    rows = []
    for entry in entries:
        cost, par = entry["extra_info"]["cost"], entry["extra_info"]["par"]
        if par and cost != par:
            percent = 100 * cost / par
            name = columns.label(entry).partition(":")[0]
            rows.append((name, percent, f"{formats.number(percent)}%", GOOD if cost <= par else BAD))
    if not rows:
        return None
    caption = "Solutions that are not at par: their cost as a share of par; left of the line is better."
    return shares(rows, "par", caption, "cost as a share of")
