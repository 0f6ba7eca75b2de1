"""Collectives beside another library's: the ratio of times over the bytes, a line for each way."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.benchmarks.harness import columns
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figure_style import INK, color, figure, legend, svg
from minidist.benchmarks.report.plots import Plot


def curves(entries: Sequence[Entry], page_name: str) -> dict[int, Plot]:
    """For each number of ranks a figure, where two sizes or more were measured."""
    found: dict[int, dict[str, list[tuple[int, float, float, float]]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if entry["suite"] == "bench_collectives" and {"ratio", "bytes", "ranks"} <= extra.keys():
            way = columns.label(entry).partition(",")[0]
            point = extra["bytes"], extra["ratio"], extra["pair_ratio_q1"], extra["pair_ratio_q3"]
            found.setdefault(extra["ranks"], {}).setdefault(way, []).append(point)
    return {
        ranks: _curves(ways, ranks, f"{page_name}-{ranks}")
        for ranks, ways in sorted(found.items())
        if any(len(points) > 1 for points in ways.values())
    }


def _curves(ways: dict[str, list[tuple[int, float, float, float]]], ranks: int, page_name: str) -> Plot:
    drawn, axes = figure(3.2 + 0.2 * len(ways))
    told = []
    for index, (way, points) in enumerate(ways.items()):
        sizes, ratios, lows, highs = zip(*sorted(points), strict=True)
        axes.plot(sizes, ratios, marker="o", markersize=4, linewidth=1.6, color=color(index))
        axes.vlines(sizes, lows, highs, color=color(index), linewidth=3, alpha=0.35)
        told.append(f"{way} {min(ratios):.2f} to {max(ratios):.2f}")
    axes.axhline(1.0, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xscale("log", base=2)
    ticks = sorted({size for points in ways.values() for size, *_ in points})
    axes.set_xticks(ticks[::2], [columns.binary_size(size) for size in ticks[::2]])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of the tensor")
    axes.set_ylabel("our time over the other's")
    legend(drawn, {color(index): way for index, way in enumerate(ways)}, columns=1)
    return Plot(
        svg(drawn, page_name),
        f"Ratios of times over the size on {ranks} ranks, beside a line at 1: {'; '.join(told)}.",
        "Below the line ours is faster; a bar is the middle half of the ratios of single pairs.",
    )
