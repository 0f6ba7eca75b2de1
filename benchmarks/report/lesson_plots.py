"""Show the costs of the exercises' solutions against par: a sentence, and bars for those that differ.

Most solutions meet par exactly, since par was set by them. Bars of 100% would add nothing to the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figure_style import BAD, GOOD, shares, svg
from minidist.benchmarks.report.plots import Plot


def sentence(entries: Sequence[Entry]) -> str:
    """Say how many solutions cost no more than par."""
    met = sum(entry["extra_info"]["cost"] <= entry["extra_info"]["par"] for entry in entries)
    return f"{met} of {len(entries)} solutions cost no more than par."


def bars(entries: Sequence[Entry], page_name: str) -> Plot | None:
    """Draw a bar for each solution that is not at par, or return None if all are."""
    rows = []
    for entry in entries:
        cost, par = entry["extra_info"]["cost"], entry["extra_info"]["par"]
        if par and cost != par:
            percent = 100 * cost / par
            name = columns.label(entry).partition(":")[0]
            rows.append((name, percent, f"{formats.number(percent)}%", GOOD if cost <= par else BAD))
    if not rows:
        return None
    drawn, told = shares(rows, "cost as a share of par, percent")
    return Plot(
        svg(drawn, page_name),
        f"Bars with a line at 100 percent of par: {told}.",
        "Solutions that are not at par: their cost as a share of par; left of the line is better.",
    )
