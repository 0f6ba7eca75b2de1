"""Draw scaling curves: speed over the number of ranks, with the ideal as a dashed line."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figure_style import INK, MUTED, apart, color, figure, svg
from minidist.benchmarks.report.plots import Plot

WORDS = {
    "strong": (
        "times the speed of one rank",
        "One batch divided over more ranks: on the dashed line, N ranks are N times as fast.",
    ),
    "weak": (
        "speed per rank, relative to one rank",
        "The same number of rows on every rank: the dashed line loses nothing.",
    ),
}


def curves(entries: Sequence[Entry], kind: str, page_name: str, cores: int) -> Plot | None:
    """Draw strong or weak scaling, a line for each series, or return None if it was not measured."""
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
    ideal = [float(size) if kind == "strong" else 1.0 for size in sizes]
    axes.plot(sizes, ideal, color=INK, linewidth=1.2, linestyle="--")
    ends = [(ideal[-1], "ideal", INK)]
    for index, (name, points) in enumerate(series.items()):
        xs, ys = zip(*sorted({1: 1.0, **dict(points)}.items()), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=color(index))
        ends.append((ys[-1], name, color(index)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    high = 1.08 * max(max(ideal), *(y for points in series.values() for _, y in points))
    axes.set_ylim(0, high)
    axes.set_xlim(0.93, sizes[-1] * sizes[-1] ** 0.75)  # room for names
    if cores < sizes[-1]:
        axes.axvspan(cores, sizes[-1], color=MUTED, alpha=0.12, linewidth=0)
        axes.text(
            sizes[-1] * 0.97,
            0.02 * high,
            f"more ranks than {cores} cores",
            ha="right",
            fontsize=8.5,
            color=MUTED,
        )
    axes.set_xlabel("ranks")
    words, caption = WORDS[kind]
    axes.set_ylabel(words)
    ends.sort()
    for (y, name, shade), height in zip(
        ends, apart([y for y, _, _ in ends], 0.075 * high, high), strict=True
    ):
        del y
        axes.annotate(
            name,
            (sizes[-1], height),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=shade,
        )
    told = "; ".join(f"{name} {max(points)[1]:.2f} at {max(points)[0]}" for name, points in series.items())
    return Plot(
        svg(drawn, page_name),
        f"{kind.capitalize()} scaling over {sizes[0]} to {sizes[-1]} ranks, {words}: {told}; "
        f"ideal {ideal[-1]:g}.",
        caption,
    )
