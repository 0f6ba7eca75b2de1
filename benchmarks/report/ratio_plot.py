"""Draw all comparisons: a dot for our time over the peer's, and a bar for the middle half of the pairs."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.benchmarks.harness import columns
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report import verdicts
from minidist.benchmarks.report.figure_style import BAD, CARD, GOOD, INK, MUTED, figure, svg
from minidist.benchmarks.report.plots import Plot

SHADES = {"faster": GOOD, "slower": BAD, "undecided": MUTED}
MARKS = {"faster": "o", "slower": "D", "undecided": "s"}


def ratios(entries: Sequence[Entry], page_name: str) -> Plot | None:
    """Draw all results with a peer, or return None if there are none."""
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
    axes.axvline(1.0, color=INK, linewidth=1.2, linestyle="--")
    axes.set_xlim(left=0)
    axes.set_ylim(len(paired) - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_xlabel("our time over the peer's")
    return Plot(
        svg(drawn, page_name),
        f"Ratios of times with a line at 1: {'; '.join(told)}.",
        "Each name is ours – the peer's. Left of the line we are faster. A bar is the middle half of the "
        "pairs' ratios; it is grey if the comparison is undecided.",
    )
