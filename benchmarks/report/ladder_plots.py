"""Figures of the CUDA ladder: each rung's share of torch.matmul's speed, and the GPU's roofline."""

from __future__ import annotations

from minidist.benchmarks.harness import formats
from minidist.benchmarks.report import roofline_figure
from minidist.benchmarks.report.figure_style import MUTED, shares, svg
from minidist.benchmarks.report.ladder import NOTHING, Ladder, Row
from minidist.benchmarks.report.plots import Plot
from minidist.benchmarks.report.roofline_figure import color_of
from minidist.kernels.measure.points import intensity


def bars(ladder: Ladder, page_name: str) -> Plot:
    """Draw a bar for each rung and arithmetic, at the size that most of them have."""
    common = ladder.common_size
    rows = []
    for row in ladder.rows:
        size = max((size for size in row.entries if size <= common), default=max(row.entries, default=0))
        percent = row.percent(size)
        text = NOTHING if percent is None else f"{formats.number(percent)}%"
        rows.append((row.name, percent, text if size in (0, common) else f"{text}, n = {size}", _color(row)))
    drawn, told = shares(rows, "share of torch.matmul's speed, percent")
    return Plot(
        svg(drawn, page_name),
        f"Bars with a line at 100 percent of torch.matmul's speed: {told}.",
        f"Share of torch.matmul's speed in the same arithmetic, at n = {common}; the line is torch.matmul.",
    )


def roofline(ladder: Ladder, page_name: str) -> Plot | None:
    """Draw the rungs on the GPU's roofline, or return None if no peak was measured."""
    rows = [row for row in ladder.rows if row.largest("peak_gflops")]
    if not rows:
        return None
    told = "; ".join(
        f"{row.name} {formats.number(row.largest('gflops') or 0.0)} of "
        f"{formats.number(row.largest('peak_gflops') or 0.0)}"
        for row in rows
    )
    return roofline_figure.roofline(
        ladder.device,
        [roofline_figure.Line(row.name, _points(row), _color(row)) for row in rows],
        {str(row.dtype): row.largest("peak_gflops") or 0.0 for row in rows},
        max(row.largest("peak_gb_per_s") or 0.0 for row in rows),
        page_name,
        told,
        "The roofline: its slope is the rate of a copy within the GPU's memory, and each peak is the rate of "
        "the vendor's own product at its best. A point for each n.",
    )


def _points(row: Row) -> list[tuple[float, float]]:
    """Return FLOP/byte and GFLOP/s at each size."""
    return [
        (intensity(size, size, size, str(row.dtype)), entry["extra_info"]["gflops"])
        for size, entry in sorted(row.entries.items())
    ]


def _color(row: Row) -> str:
    return MUTED if row.dtype is None else color_of(row.dtype)
