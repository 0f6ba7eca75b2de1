"""What exercises' solutions cost, as a share of the par that each exercise names."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.benchmarks import columns
from minidist.benchmarks.columns import Entry
from minidist.benchmarks.drawing import BAD, GOOD, shares, svg
from minidist.benchmarks.plots import Plot


def bars(entries: Sequence[Entry], page_name: str) -> Plot | None:
    """A bar for each exercise; None where none has a par."""
    rows = []
    for entry in entries:
        extra = entry["extra_info"]
        if extra["par"]:
            percent = 100 * extra["cost"] / extra["par"]
            text = f"{columns.number(percent)}%"
            rows.append((columns.label(entry), percent, text, GOOD if percent <= 100 else BAD))
    if not rows:
        return None
    drawn, told = shares(rows, "cost as a share of par, percent")
    return Plot(
        svg(drawn, page_name),
        f"Bars beside a line at 100 percent of par: {told}.",
        "What a solution costs as a share of par; left of the line it is met.",
    )
