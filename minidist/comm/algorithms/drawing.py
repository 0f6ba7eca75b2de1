"""Draw a schedule: a line for each rank, time to the right, and an arrow for each message.

An arrow starts when both ends of a message have reached it, and takes one unit of time. Its label is the
Python slice of the elements that it carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from minidist.comm.algorithms.proof import Delivery, run, start
from minidist.comm.algorithms.registry import CollectiveSchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MUTED = "#707070"
# Okabe and Ito's blue and vermilion, which people with any colour vision tell apart.
ARROWS: dict[bool, tuple[str, Literal["-", "--"], str]] = {
    True: ("#0072B2", "-", "combined with what is there"),
    False: ("#D55E00", "--", "stored"),
}
"""Colour, line and meaning of an arrow, by whether its receive reduces."""


def draw(schedule: CollectiveSchedule) -> Figure:
    """Draw a schedule; a notebook shows the figure, and `figure.savefig(path)` keeps it.

    It leaves out empty messages, and messages of a rank to itself. Meant for few ranks and few steps.

    Raises:
        ScheduleError: the schedule does not end.
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib is missing, and drawing needs it: pip install 'minidist[bench]'"
        ) from error
    messages = [
        delivery
        for delivery in run(schedule, *start(schedule))
        if delivery.sent.elements and delivery.sender != delivery.receiver
    ]
    end = max((message.begins + 1 for message in messages), default=1)
    with matplotlib.style.context("default"):  # a dark theme would change the colours
        size = (max(4.0, 1.2 + 1.35 * end), 1.4 + 0.85 * schedule.ranks)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        _lines(axes, schedule, end)
        labels: list[tuple[float, float]] = []
        for message in messages:
            others = [one for one in messages if one.begins == message.begins and one is not message]
            along = _clearest(message, others, labels)
            labels.append(_point(message, along))
            _arrow(axes, message, along)
        _legend(axes, {message.received.reduce for message in messages})
    return figure


def _lines(axes: Axes, schedule: CollectiveSchedule, end: int) -> None:
    axes.set(xlim=(-0.15, end + 0.15), ylim=(schedule.ranks - 0.6, -0.4))
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_xticks([step + 0.5 for step in range(end)], [str(step) for step in range(end)])
    axes.set_xlabel("step")
    title = (
        f"{schedule.operation}, {schedule.algorithm}: {schedule.ranks} ranks, {schedule.elements} elements"
    )
    axes.set_title(title, loc="left", fontsize=10, color=MUTED)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for step in range(end + 1):
        axes.axvline(step, color="#e4e4e4", linewidth=0.8, zorder=0)
    for rank in range(schedule.ranks):
        axes.axhline(rank, color="#b0b0b0", linewidth=1, zorder=1)


def _arrow(axes: Axes, message: Delivery, along: float) -> None:
    """Draw one message, with its label at the fraction `along` of the arrow."""
    color, line, _ = ARROWS[message.received.reduce]
    style = {"arrowstyle": "-|>", "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    tail, head = (message.begins + 0.02, message.sender), (message.begins + 0.98, message.receiver)
    axes.annotate("", xy=head, xytext=tail, arrowprops={**style, "color": color, "linestyle": line})
    axes.text(
        *_point(message, along),
        f"{message.sent.start}:{message.sent.stop}",
        fontsize=8,
        color=color,
        ha="center",
        va="center",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )


def _point(message: Delivery, along: float) -> tuple[float, float]:
    return message.begins + along, message.sender + along * (message.receiver - message.sender)


def _clearest(message: Delivery, others: list[Delivery], labels: list[tuple[float, float]]) -> float:
    """The fraction of an arrow at which a label is farthest from other arrows and labels."""

    def clearance(along: float) -> float:
        x, y = _point(message, along)
        # From arrows at the same time, and from labels, which are wider than high.
        arrows = (abs(_point(other, along)[1] - y) for other in others)
        boxes = (max(2 * abs(a - x), 2 * abs(b - y)) for a, b in labels)
        lines = abs(y - round(y)) if abs(message.receiver - message.sender) > 1 else 1.0
        return min([0.5, *arrows, *boxes, 2 * lines])

    # The earliest of the clearest.
    return max((0.25 + 0.05 * i for i in range(11)), key=lambda along: (clearance(along), -along))


def _legend(axes: Axes, kinds: set[bool]) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=color, linestyle=line, label=label)
        for kind, (color, line, label) in ARROWS.items()
        if kind in kinds
    ]
    if lines:
        axes.legend(
            handles=lines, loc="upper right", bbox_to_anchor=(1, -0.1), ncols=2, frameon=False, fontsize=9
        )
