"""Simulate a schedule without a process: when each pass runs, how long ranks wait, how much they hold.

Each rank runs its instructions in order. A receive waits for its message; every pass takes the time that is
given for it. The papers named in schedules.py derive their formulas from this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minidist._names import unknown
from minidist.parallel.pipeline.instructions import (
    COMPUTE,
    Instruction,
    Schedule,
    StageMessage,
    sizes,
    stage_of,
)
from minidist.parallel.pipeline.replay import replay
from minidist.parallel.pipeline.schedule_proof import check_rules

PassTimes = Mapping[str, float | Sequence[float | Sequence[float]]]
"""Seconds of "forward", "backward", "backward_input", "backward_weight" and "message": one number for all,
one for each stage (of a message: the stage that sends it), or for each stage a list, one per micro-batch."""

DEFAULTS = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "message": 0.0}
"""A backward pass takes twice the time of a forward pass: two matrix products for each one."""


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
    ranks, micro_batches, chunks = sizes(schedule)
    seconds = _by_pass(times or {}, ranks * chunks, micro_batches)
    timeline: list[list[Event]] = [[] for _ in schedule]
    clocks = [0.0] * ranks
    arrivals: dict[StageMessage, float] = {}
    for rank, each, message in replay(schedule):
        stage, start = stage_of(rank, each.chunk, ranks), clocks[rank]
        if message is None:
            clocks[rank] = start + seconds[each.kind][stage][each.micro_batch]
            timeline[rank].append(Event(each, start, clocks[rank]))
        elif each.kind.startswith("send"):
            arrivals[message] = start + seconds["message"][stage][each.micro_batch]
        else:
            clocks[rank] = max(start, arrivals[message])
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
