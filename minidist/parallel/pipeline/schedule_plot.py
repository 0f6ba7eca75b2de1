"""Draw a schedule as a Gantt chart: a row for each rank, a box for each pass, white while a rank waits."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from minidist.parallel.pipeline.instructions import Schedule, sizes
from minidist.parallel.pipeline.simulation import PassTimes, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = {
    "forward": ("forward", "#56B4E9"),
    "backward": ("backward", "#E69F00"),
    "backward_input": ("backward, inputs", "#E69F00"),
    "backward_weight": ("backward, weights", "#009E73"),
}
"""Labels and colours. People with any colour vision can tell apart this palette, of Okabe and Ito."""


def plot(
    schedule: Schedule,
    times: PassTimes | None = None,
    ax: Axes | None = None,
    path: str | PathLike[str] | None = None,
) -> Axes:
    """Draw a schedule as a Gantt chart, with the number of the micro-batch in each box.

    The first of several chunks is pale, the last is strong.

    Args:
        times: of the passes; see `simulate`.
        ax: where to draw; None for a new figure.
        path: a file to write, such as a .png or .svg; None for none.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: an argument has the wrong type.
        ValueError: the schedule fails `check`, or the times do not fit it.
    """
    try:
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("matplotlib is missing, which draws: pip install 'minidist[bench]'") from error
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax is {ax!r}; give matplotlib's Axes, or None for a figure of its own")
    if path is not None and not isinstance(path, str | PathLike):
        raise TypeError(f"path is {path!r}; give the name of a file to write, such as 'schedule.png'")
    simulation = simulate(schedule, times)
    ranks, _, chunks = sizes(schedule)
    drawn = {event.instruction.kind for events in simulation.timeline for event in events}
    shades = [
        Patch(
            color=color,
            alpha=_strength(chunk, chunks),
            label=label + (f", chunk {chunk}" if chunks > 1 else ""),
        )
        for kind, (label, color) in DRAWN.items()
        if kind in drawn
        for chunk in range(chunks)
    ]
    if ax is None:
        ax = Figure(
            figsize=(10, max(0.6 + 0.5 * ranks, 0.4 + 0.22 * len(shades))), layout="constrained"
        ).add_subplot()
    figure = ax.get_figure(root=True)
    assert figure is not None
    for rank, events in enumerate(simulation.timeline):
        for each, start, end in events:
            alpha = _strength(each.chunk, chunks)
            ax.barh(rank, end - start, left=start, color=DRAWN[each.kind][1], alpha=alpha, edgecolor="white")
            middle = (start + end) / 2
            ax.text(middle, rank, str(each.micro_batch), ha="center", va="center", fontsize=7)
    ax.legend(handles=shades, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    ax.set(
        yticks=range(ranks),
        yticklabels=[f"rank {rank}" for rank in range(ranks)],
        ylim=(ranks - 0.5, -0.5),
        xlim=(0, simulation.seconds),
        xlabel=f"time; ranks wait for {simulation.bubble:.1%} of it",
    )
    if path is not None:
        figure.savefig(path, dpi=150)
    return ax


def _strength(chunk: int, chunks: int) -> float:
    """The opacity of a chunk's colour."""
    return 1.0 if chunks == 1 else 0.45 + 0.55 * chunk / (chunks - 1)
