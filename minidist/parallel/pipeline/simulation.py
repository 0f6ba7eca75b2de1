"""What a schedule costs, without a process: when each rank does what, how long it waits, what it holds.

Each rank runs its instructions in order; a receive waits for its message, all else takes the time that is
given for it. It is the model behind the formulas of the papers named in schedules.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidist._names import unknown
from minidist.parallel.pipeline.instructions import (
    COMPUTE,
    Instruction,
    Schedule,
    StageMessage,
    message_of,
    sizes,
    stage_of,
)
from minidist.parallel.pipeline.schedule_proof import check

PassTimes = Mapping[str, float | Sequence[float | Sequence[float]]]
"""Seconds of "forward", "backward", "backward_input", "backward_weight" and "message": a number, or one for
each stage (of a message: for each stage that sends it), or for each stage one for each micro-batch."""

DEFAULTS = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "message": 0.0}
"""A backward pass takes twice a forward pass's time: it has two products where that has one."""


class Event(NamedTuple):
    """An instruction as it was executed, in seconds from the beginning."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What came of a schedule.

    Attributes:
        timeline: for each rank what it computed, in order.
        seconds: from the beginning to the end of the last rank's last pass.
        bubble: the share of all ranks' time in which they waited.
        bubbles: the same for each rank.
        peak_activations: for each rank the most passes (a micro-batch through a chunk) that were live at a
            time: begun forward, and not yet through the backward pass, weights included.
    """

    timeline: list[list[Event]]
    seconds: float
    bubble: float
    bubbles: list[float]
    peak_activations: list[int]


def simulate(schedule: Schedule, times: PassTimes | None = None) -> Simulation:
    """Execute a schedule in thought.

    >>> simulate(gpipe(4, 8), {"forward": 1, "backward": 2}).bubble  # (p - 1) / (m + p - 1)
    0.2727...

    Args:
        schedule: for each rank its instructions.
        times: see `PassTimes`; what is not given takes 1 s, a message none, a whole backward pass as long as
            its two parts.

    Raises:
        TypeError: times are no dict.
        ValueError: the schedule fails `check`; or times are negative, unknown, or too few or too many.
    """
    check(schedule)
    if times is not None and not isinstance(times, Mapping):
        raise TypeError(
            f"times is {times!r}; give a dict of seconds, such as {{'forward': 1, 'backward': 2}}"
        )
    ranks, micro_batches, chunks = sizes(schedule)
    seconds = _by_pass(times or {}, ranks * chunks, micro_batches)
    timeline: list[list[Event]] = [[] for _ in schedule]
    clocks, places = [0.0] * ranks, [0] * ranks
    arrivals: dict[StageMessage, float] = {}
    while any(places[rank] < len(own) for rank, own in enumerate(schedule)):
        for rank, own in enumerate(schedule):
            while places[rank] < len(own):
                each = own[places[rank]]
                if each.computes:
                    start = clocks[rank]
                    stage = stage_of(rank, each.chunk, ranks)
                    clocks[rank] += seconds[each.kind][stage][each.micro_batch]
                    timeline[rank].append(Event(each, start, clocks[rank]))
                else:
                    _, message = message_of(each, rank, ranks)
                    if each.kind.startswith("send"):
                        sender = stage_of(rank, each.chunk, ranks)
                        arrivals[message] = clocks[rank] + seconds["message"][sender][each.micro_batch]
                    elif message in arrivals:
                        clocks[rank] = max(clocks[rank], arrivals[message])
                    else:
                        break
                places[rank] += 1
    total = max(clocks)
    busy = [sum(event.end - event.start for event in events) for events in timeline]
    bubbles = [1 - each / total if total else 0.0 for each in busy]
    return Simulation(timeline, total, sum(bubbles) / ranks, bubbles, [*map(peak_live, schedule)])


def peak_live(instructions: Sequence[Instruction]) -> int:
    """The most passes of one rank that are live at a time; see `Simulation`."""
    live = peak = 0
    for each in instructions:
        live += each.kind == "forward"
        peak = max(peak, live)
        live -= each.kind in ("backward", "backward_weight")
    return peak


def _by_pass(times: PassTimes, stages: int, micro_batches: int) -> dict[str, list[list[float]]]:
    """For each kind and stage the seconds of each micro-batch."""
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
