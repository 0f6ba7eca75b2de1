"""Draw memory as stacked bars: a bar for each layout, divided by use, and a line at the GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figure_style import CARD, INK, MUTED, after, color, figure, legend, svg
from minidist.benchmarks.report.plots import Plot

PARTS = {
    "parameters": color(0),
    "gradients": color(1),
    "optimizer": color(2),
    "activations": color(3),
    "buffers": color(5),
    "transient": MUTED,
}
LEAST = 0.13  # share of the axis; a shorter part has no room for its number


def bars(
    rows: Sequence[tuple[str, Mapping[str, int]]], page_name: str, caption: str, limit: int | None = None
) -> Plot:
    """Draw a bar for each name, with its bytes by part; `limit` is the memory that is available."""
    drawn, axes = figure(0.9 + 0.5 * len(rows))
    most = max([*(sum(parts.values()) for _, parts in rows), limit or 0, 1])
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "B")) if most >= s)
    told = []
    for row, (name, parts) in enumerate(rows):
        whole = sum(parts.values())
        axes.text(0, row - 0.38, name, va="center", fontsize=10, color=INK)
        start = 0.0
        for part, shade in PARTS.items():
            length = parts.get(part, 0) / scale
            if length:
                axes.barh(
                    row + 0.08, length, left=start, height=0.5, color=shade, edgecolor=CARD, linewidth=0.8
                )
                if length * scale > LEAST * most:
                    text = formats.number(length)
                    axes.text(
                        start + length / 2, row + 0.08, text, ha="center", va="center", fontsize=8, color=CARD
                    )
                start += length
        over = limit is not None and whole > limit
        after(axes, start, row + 0.08, f"{formats.size(whole)}{', too much' if over else ''}")
        several = ", ".join(f"{part} {formats.size(parts[part])}" for part in PARTS if parts.get(part))
        told.append(f"{name} {formats.size(whole)} ({several})")
    if limit is not None:
        axes.axvline(limit / scale, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, most / scale * 1.32)
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlabel(f"{unit} on the fullest rank")
    used = {shade: part for part, shade in PARTS.items() if any(parts.get(part) for _, parts in rows)}
    legend(drawn, used)
    line = f" with a line at {formats.size(limit)}" if limit else ""
    return Plot(svg(drawn, page_name), f"Stacked bars of memory{line}: {'; '.join(told)}.", caption)


def measured(entries: Sequence[Entry], page_name: str) -> Plot | None:
    """Draw the counted memory of results, or return None without results."""
    rows = [(columns.label(entry), entry["extra_info"]["memory"]) for entry in entries]
    return (
        bars(rows, page_name, "Counted bytes on the fullest rank after a step; shorter is better.")
        if rows
        else None
    )
