"""Plot collectives against another library's, over the tensor's size; and say what the cost model fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figure_style import INK, color, figure, legend, svg
from minidist.benchmarks.report.plots import Plot

# The figures of a fit in seconds per byte; the others are seconds per call.
A_BYTE = ("beta", "busy_beta", "gamma", "put", "take", "combine")


def curves(entries: Sequence[Entry], page_name: str) -> dict[int, Plot]:
    """Return a figure for each number of ranks with at least two measured sizes."""
    found: dict[int, dict[str, list[tuple[int, float, float, float]]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if entry["suite"] == "bench_collectives" and {"ratio", "bytes", "ranks"} <= extra.keys():
            operation = columns.label(entry).partition(",")[0]
            point = extra["bytes"], extra["ratio"], extra["pair_ratio_q1"], extra["pair_ratio_q3"]
            found.setdefault(extra["ranks"], {}).setdefault(operation, []).append(point)
    return {
        ranks: _curves(operations, ranks, f"{page_name}-{ranks}")
        for ranks, operations in sorted(found.items())
        if any(len(points) > 1 for points in operations.values())
    }


def _curves(operations: dict[str, list[tuple[int, float, float, float]]], ranks: int, page_name: str) -> Plot:
    drawn, axes = figure(3.2 + 0.2 * len(operations))
    told = []
    for index, (operation, points) in enumerate(operations.items()):
        sizes, ratios, lows, highs = zip(*sorted(points), strict=True)
        axes.plot(sizes, ratios, marker="o", markersize=4, linewidth=1.6, color=color(index))
        axes.vlines(sizes, lows, highs, color=color(index), linewidth=3, alpha=0.35)
        told.append(f"{operation} {min(ratios):.2f} to {max(ratios):.2f}")
    axes.axhline(1.0, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xscale("log", base=2)
    ticks = sorted({size for points in operations.values() for size, *_ in points})
    axes.set_xticks(ticks[::2], [formats.binary_size(size) for size in ticks[::2]])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of the tensor")
    axes.set_ylabel("our time over the peer's")
    legend(drawn, {color(index): name for index, name in enumerate(operations)}, columns=1)
    return Plot(
        svg(drawn, page_name),
        f"Ratios of times over the size on {ranks} ranks, with a line at 1: {'; '.join(told)}.",
        "Below the line we are faster. A bar is the middle half of the pairs' ratios.",
    )


def fit_in_words(fitted: dict[str, Any]) -> str:
    """Format the parameters of a fit: `alpha 35.1 µs, beta 0.24 ns per byte (4.20 GB/s)`."""
    words = []
    for name, number in fitted.items():
        if not isinstance(number, (int, float)):
            continue
        if name == "beta" and number > 0:
            words.append(f"beta {formats.seconds(number)} per byte ({formats.number(1e-9 / number)} GB/s)")
        elif name in A_BYTE:
            words.append(f"{name} {formats.seconds(number)} per byte")
        else:
            words.append(f"{name} {formats.seconds(number)}")
    return ", ".join(words)
