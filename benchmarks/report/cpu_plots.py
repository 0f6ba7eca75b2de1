"""Figures of the CPU ladder: each rung's share of BLAS's speed, and the roofline of one core."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from minidist.benchmarks.harness import formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report import roofline_figure
from minidist.benchmarks.report.figure_style import color, shares, svg
from minidist.benchmarks.report.plots import Plot
from minidist.kernels.measure.points import intensity


def rungs(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the results of the ladder on one core by rung, each rung's in the order of size."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if entry["suite"] == "bench_cpu_matmul" and {"series", "size", "gflops"} <= extra.keys():
            found.setdefault(extra["series"], []).append(entry)
    for several in found.values():
        several.sort(key=lambda entry: int(entry["extra_info"]["size"]))
    return dict(sorted(found.items()))


def bars(entries: Sequence[Entry], page_name: str) -> Plot | None:
    """Draw a bar for each rung, at its largest size."""
    rows = []
    for index, (name, several) in enumerate(rungs(entries).items()):
        extra = several[-1]["extra_info"]
        if "percent_of_peer" in extra:
            percent = extra["percent_of_peer"]
            text = f"{formats.number(percent)}%, n = {extra['size']:,}"
            rows.append((name, percent, text, color(index)))
            peer = extra["peer"]
    if not rows:
        return None
    drawn, told = shares(rows, f"share of {peer}'s speed, percent")
    return Plot(
        svg(drawn, page_name),
        f"Bars with a line at 100 percent of {peer}'s speed: {told}.",
        f"Share of {peer}'s speed on one core in float32, at each rung's largest n; the line is {peer}.",
    )


def roofline(entries: Sequence[Entry], device: str, page_name: str) -> Plot | None:
    """Draw the rungs on the roofline of one core, or return None if no peak was measured."""
    found = rungs(entries)
    measured = [entry["extra_info"] for several in found.values() for entry in several]
    peaks = [
        100 * extra["gflops"] / extra["percent_of_peak"] for extra in measured if extra.get("percent_of_peak")
    ]
    if not peaks:
        return None
    peak = statistics.median(peaks)
    bandwidths = [extra["peak_gb_per_s"] for extra in measured if "peak_gb_per_s" in extra]
    lines = [
        roofline_figure.Line(
            name,
            [
                (intensity(n, n, n, "float32"), entry["extra_info"]["gflops"])
                for entry in several
                for n in [entry["extra_info"]["size"]]
            ],
            color(index),
        )
        for index, (name, several) in enumerate(found.items())
    ]
    told = "; ".join(
        f"{name} {formats.number(several[-1]['extra_info']['gflops'])} of {formats.number(peak)}"
        for name, several in found.items()
    )
    slope = "its slope is the rate at which a core reads memory, and " if bandwidths else ""
    return roofline_figure.roofline(
        f"one core of {device}",
        lines,
        {"float32": peak},
        statistics.median(bandwidths) if bandwidths else None,
        page_name,
        told,
        f"The roofline of one core: {slope}its peak is the rate of fused multiply-adds. A point for each n.",
    )
