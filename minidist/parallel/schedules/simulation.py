"""Simulate a schedule without a process, and draw it: when passes run, how long ranks wait, what they hold.

Each rank runs its instructions in order. A receive waits for its message; every pass takes the time that is
given for it. The formulas in contract/schedule_kinds.py follow from this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from minidist._names import unknown
from minidist.parallel.schedules.instructions import (
    COMPUTE,
    Instruction,
    Schedule,
    StageMessage,
    placement_of,
    sizes,
)
from minidist.parallel.schedules.schedule_proof import Deadlock, check_rules, replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PassTimes = Mapping[str, float | Sequence[float | Sequence[float]]]
"""Seconds of "forward", "backward", "backward_input", "backward_weight" and "message": one number for all,
one for each stage (of a message: the stage that sends it), or for each stage a list, one per micro-batch."""

DEFAULTS = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "message": 0.0}
"""A backward pass takes twice the time of a forward pass: two matrix products for each one."""
DRAWN = {
    "forward": ("forward", "#56B4E9"),
    "backward": ("backward", "#E69F00"),
    "backward_input": ("backward, inputs", "#E69F00"),
    "backward_weight": ("backward, weights", "#009E73"),
}
"""Labels and colours. People with any colour vision can tell apart this palette, of Okabe and Ito."""


class Event(NamedTuple):
    """An instruction as it was executed, in seconds from the beginning."""

    instruction: Instruction
    start: float
    end: float


class Simulation(NamedTuple):
    """The passes of a simulated schedule, the time that ranks wait, and the activations that they hold.

    A pass of a micro-batch through a chunk is live from the beginning of its forward pass to the end of its
    backward pass, weights included.
    """

    timeline: list[list[Event]]  # for each rank its passes, in order
    seconds: float  # from the beginning to the end of the last pass
    bubble: float  # the share of all ranks' time in which they wait
    bubbles: list[float]  # the same for each rank
    peak_activations: list[int]  # for each rank the largest number of passes that are live at a time


def simulate(schedule: Schedule, times: PassTimes | None = None) -> Simulation:
    """When each rank of a schedule computes, and how long it waits.

    >>> simulate(gpipe(4, 8), {"forward": 1, "backward": 2}).bubble  # (p - 1) / (m + p - 1)
    0.2727...

    Args:
        times: see `PassTimes`. A pass that is not given takes 1 s, a message 0 s, and a whole backward pass
            as long as its two parts.

    Raises:
        TypeError: times is not a dict.
        ValueError: the schedule fails `check`, or times are negative, unknown, too few or too many.
    """
    check_rules(schedule)
    if times is not None and not isinstance(times, Mapping):
        raise TypeError(
            f"times is {times!r}; give a dict of seconds, such as {{'forward': 1, 'backward': 2}}"
        )
    (ranks, micro_batches, chunks), stages = sizes(schedule), placement_of(schedule).stages
    seconds = _by_pass(times or {}, ranks * chunks, micro_batches)
    timeline: list[list[Event]] = [[] for _ in schedule]
    clocks = [0.0] * ranks
    arrivals: dict[StageMessage, float] = {}
    try:
        for rank, each, message in replay(schedule):
            stage, start = stages[rank][each.chunk], clocks[rank]
            if message is None:
                clocks[rank] = start + seconds[each.kind][stage][each.micro_batch]
                timeline[rank].append(Event(each, start, clocks[rank]))
            elif each.kind.startswith("send"):
                arrivals[message] = start + seconds["message"][stage][each.micro_batch]
            else:
                clocks[rank] = max(start, arrivals[message])
    except Deadlock as stuck:
        stuck.timeline = timeline
        raise
    total = max(clocks)
    busy = [sum(event.end - event.start for event in events) for events in timeline]
    bubbles = [1 - each / total if total else 0.0 for each in busy]
    return Simulation(timeline, total, sum(bubbles) / ranks, bubbles, [*map(peak_live, schedule)])


def peak_live(instructions: Sequence[Instruction]) -> int:
    """The largest number of one rank's passes that are live at a time, as in `Simulation`."""
    live = peak = 0
    for each in instructions:
        live += each.kind == "forward"
        peak = max(peak, live)
        live -= each.kind in ("backward", "backward_weight")
    return peak


def _by_pass(times: PassTimes, stages: int, micro_batches: int) -> dict[str, list[list[float]]]:
    """Seconds by kind, stage and micro-batch."""
    known = (*COMPUTE, "message")
    found: dict[str, list[list[float]]] = {}
    for name, value in {**DEFAULTS, **times}.items():
        if name not in known:
            raise unknown("time", name, known)
        try:
            rows = [value] * stages if isinstance(value, int | float) else [*value]
            each = [
                [float(row)] * micro_batches if isinstance(row, int | float) else [*map(float, row)]
                for row in rows
            ]
        except (TypeError, ValueError):
            each = []
        fits = len(each) == stages and all(len(row) == micro_batches for row in each)
        if not fits or not all(0 <= second < float("inf") for row in each for second in row):
            raise ValueError(
                f"the times of {name} are {value!r}; give seconds of 0 or more, a number or {stages} of "
                f"them, one for each stage, each of which may be {micro_batches}, one for each micro-batch"
            )
        found[name] = each
    if "backward" not in found:
        parts = zip(found["backward_input"], found["backward_weight"], strict=True)
        found["backward"] = [[*map(sum, zip(*pair, strict=True))] for pair in parts]
    return found


def plot(
    schedule: Schedule,
    times: PassTimes | None = None,
    ax: Axes | None = None,
    path: str | PathLike[str] | None = None,
) -> Axes:
    """Draw a schedule as a Gantt chart: a row for each rank, a box for each pass, white while a rank waits.

    Each box has the number of its micro-batch. The first of several chunks is pale, the last is strong.

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
    strength = [1.0] if chunks == 1 else [0.45 + 0.55 * chunk / (chunks - 1) for chunk in range(chunks)]
    drawn = {event.instruction.kind for events in simulation.timeline for event in events}
    shades = [
        Patch(color=color, alpha=alpha, label=label + (f", chunk {chunk}" if chunks > 1 else ""))
        for kind, (label, color) in DRAWN.items()
        if kind in drawn
        for chunk, alpha in enumerate(strength)
    ]
    if ax is None:
        size = 10, max(0.6 + 0.5 * ranks, 0.4 + 0.22 * len(shades))
        ax = Figure(figsize=size, layout="constrained").add_subplot()
    figure = ax.get_figure(root=True)
    assert figure is not None
    for rank, events in enumerate(simulation.timeline):
        for each, start, end in events:
            color, alpha = DRAWN[each.kind][1], strength[each.chunk]
            ax.barh(rank, end - start, left=start, color=color, alpha=alpha, edgecolor="white")
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
