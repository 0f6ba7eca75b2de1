"""Seconds of a pipeline's schedule: with a device for each rank, or with ranks that share a host's cores.

The order of the passes, and who waits for whom, is found once for a schedule and then only added up. A
planner asks for each schedule hundreds of times and needs one number: so planning gpt2-xl on 64 ranks takes
9 s. It took 23 s with `schedules.simulate`, which first proves that a schedule is valid and keeps a time
line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from minidist.parallel.pipeline.instructions import StageMessage, placement_of
from minidist.parallel.pipeline.schedule_proof import replay
from minidist.scale.memory.estimates import schedule_of

Seconds = Mapping[str, Sequence[Sequence[float]]]
"""By kind of pass, stage and micro-batch."""
NONE = -1


class TimedPass(NamedTuple):
    """A pass in a list in which it comes after all passes that it waits for."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    waits: int  # index of the pass whose message it waits for, or NONE


@lru_cache(maxsize=256)
def passes_of(name: str, ranks: int, micro_batches: int, chunks: int) -> list[TimedPass]:
    """The passes of a schedule, in an order in which they can run; do not change the list.

    Relies on `with_messages`, which puts each message next to the pass that it belongs to.
    """
    schedule = schedule_of(name, ranks, micro_batches, chunks)
    stages = placement_of(schedule).stages
    waits, latest = [NONE] * ranks, [NONE] * ranks  # each rank's message to wait for; its last pass
    made: dict[StageMessage, int] = {}
    found: list[TimedPass] = []
    for rank, each, message in replay(schedule):
        if message is None:
            stage = stages[rank][each.chunk]
            latest[rank] = len(found)
            found.append(TimedPass(rank, each.kind, stage, each.micro_batch, waits[rank]))
            waits[rank] = NONE
        elif each.kind.startswith("send"):
            made[message] = latest[rank]
        else:
            waits[rank] = made[message]
    return found


def seconds_of(passes: Sequence[TimedPass], ranks: int, seconds: Seconds, message: float) -> float:
    """Seconds until the last pass ends, with a device for each rank; equal to `schedules.simulate`.

    `message` is the seconds from a send to its arrival.
    """
    clocks, ends = [0.0] * ranks, list[float]()
    for rank, kind, stage, micro_batch, waits in passes:
        start = clocks[rank]
        if waits != NONE:
            start = max(start, ends[waits] + message)
        clocks[rank] = end = start + seconds[kind][stage][micro_batch]
        ends.append(end)
    return max(clocks)


def seconds_on_shared_cores(
    passes: Sequence[TimedPass], ranks: int, seconds: Seconds, message: float, pace: Callable[[int], float]
) -> float:
    """Do the same for ranks that share cores.

    A rank that waits leaves its core to the others, so a bubble is no loss as long as others have work. All
    passes that run at a time progress together, at the pace that their number allows.

    seconds: of each pass while all ranks compute. pace: from how many ranks compute to the seconds of a pass,
    over those while all compute.
    """
    left = [[index for index, each in enumerate(passes) if each.rank == rank] for rank in range(ranks)]
    running: dict[int, float] = {}  # passes that run, with the rest of their seconds
    ends: dict[int, float] = {NONE: -message}  # when passes ended
    now = 0.0
    while any(left):
        arrivals = set[float]()  # when messages come that ranks wait for
        for own in left:
            if not own or own[0] in running or passes[own[0]].waits not in ends:
                continue
            _, kind, stage, micro_batch, waits = passes[own[0]]
            if ends[waits] + message <= now:
                running[own[0]] = seconds[kind][stage][micro_batch]
            else:
                arrivals.add(ends[waits] + message - now)
        # Advance to the next end of a pass or arrival of a message, when others may begin.
        slower = pace(len(running)) if running else 1.0
        passed = min(*arrivals, *(slower * rest for rest in running.values()), float("inf"))
        now += passed
        for index, rest in [*running.items()]:
            running[index] = rest - passed / slower
            if running[index] <= 1e-9 * rest:
                del running[index]
                ends[index] = now
                left[passes[index].rank].pop(0)
    return now
