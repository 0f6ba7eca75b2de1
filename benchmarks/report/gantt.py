"""Draw a pipeline's step as Gantt charts: simulated above, measured below, on one time scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figures import CARD, INK, MUTED, Plot, color, legend, stacked
from minidist.benchmarks.report.verdicts import schedule_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {
    "forward": (color(0), "forward"),
    "backward": (color(1), "backward"),
    "backward_input": (color(1), "backward"),
    "backward_weight": (color(2), "backward, weights"),
}
Timeline = Sequence[Sequence[Sequence[Any]]]
"""The passes of each rank: kind, micro-batch, chunk, start and end in seconds."""


def chart(entry: Entry) -> Plot:
    """Draw the timeline of a result."""
    extra = entry["extra_info"]
    shown = {
        which: extra["timeline"][which] for which in ("simulated", "measured") if which in extra["timeline"]
    }
    ranks = max(len(timeline) for timeline in shown.values())
    end = max(box[4] for timeline in shown.values() for rank in timeline for box in rank)
    drawn, several = stacked(0.9 + len(shown) * (0.35 + 0.3 * ranks), len(shown))
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    told, kinds = [], set()
    for axes, (which, timeline) in zip(several, shown.items(), strict=True):
        waits = extra.get("bubble", {}).get(which)
        words = which if waits is None else f"{which}: ranks wait for {100 * waits:.1f}% of the step"
        axes.set_title(words, loc="left", fontsize=10, color=INK)
        _draw(axes, timeline, end, scale)
        kinds |= {box[0] for rank in timeline for box in rank}
        last = max(box[4] for rank in timeline for box in rank)
        told.append(f"{words}, and the last pass ends after {last * scale:.3g} {unit}")
    several[-1].set_xlabel(unit)
    legend(drawn, {shade: name for kind, (shade, name) in KINDS.items() if kind in kinds})
    name = schedule_name(entry)
    return Plot(
        drawn,
        f"A Gantt chart of {ranks} ranks under {name}, {'; '.join(told)}.",
        "Each box is a pass, with the number of its micro-batch; in the gaps the rank waits.",
    )


def _draw(axes: Axes, timeline: Timeline, end: float, scale: float) -> None:
    chunks = 1 + max((box[2] for rank in timeline for box in rank), default=0)
    for rank, boxes in enumerate(timeline):
        for kind, micro_batch, chunk, start, stop in boxes:
            shade, _ = KINDS.get(kind, (MUTED, kind))
            strength = 1.0 if chunks == 1 else 0.5 + 0.5 * chunk / (chunks - 1)
            axes.barh(
                rank,
                (stop - start) * scale,
                left=start * scale,
                height=0.8,
                color=shade,
                alpha=strength,
                edgecolor=CARD,
                linewidth=0.6,
            )
            if kind in KINDS and stop - start > 0.022 * end:
                middle = (start + stop) / 2 * scale
                ink = CARD if strength > 0.75 else INK  # on a pale box
                axes.text(middle, rank, str(micro_batch), ha="center", va="center", fontsize=7.5, color=ink)
    axes.set_xlim(0, end * scale)
    axes.set_ylim(len(timeline) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in range(len(timeline))])
    axes.grid(visible=False, axis="y")
