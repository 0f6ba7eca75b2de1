"""Seconds of a pipeline's schedule: with a device for each rank, or with ranks that share a host's cores.

With a device for each rank, the order of the passes is found once and then only added up. A planner asks for
each schedule hundreds of times and needs one number: so planning gpt2-xl on 64 ranks takes 9 s. It took 23 s
with `schedules.simulate`, which first proves that a schedule is valid and keeps a time line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from minidist.parallel.pipeline.instructions import Schedule, StageMessage, moved, placement_of
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


def seconds_on_shared_cores(
    schedule: Schedule, seconds: Seconds, message: float, pace: Callable[[int], float]
) -> float:
    """Seconds of a schedule that passes `schedules.check`, when its ranks share cores.

    A rank that waits leaves its core to the others, so a bubble is no loss as long as others have work. All
    passes that run at a time progress together, at the pace that their number allows.

    seconds: of each pass while all ranks compute. message: seconds from a send to its arrival. pace: from how
    many ranks compute to the seconds of a pass, over those while all compute.
    """
    ranks, placement = len(schedule), placement_of(schedule)
    steps, left = [0] * ranks, [0.0] * ranks  # each rank's next instruction, and the rest of its pass
    arrivals: dict[StageMessage, float] = {}
    now = 0.0

    def go_on(rank: int) -> bool:
        """Carry out what takes no time, up to the next pass; return whether there was anything."""
        begun = steps[rank]
        while not left[rank] and steps[rank] < len(schedule[rank]):
            each = schedule[rank][steps[rank]]
            if each.computes:
                left[rank] = seconds[each.kind][placement.stages[rank][each.chunk]][each.micro_batch]
            else:
                what = moved(each, rank, placement)
                if each.kind.startswith("send"):
                    arrivals[what] = now + message
                elif arrivals.get(what, float("inf")) > now:
                    break
            steps[rank] += 1
        return steps[rank] > begun

    while True:
        while sum(go_on(rank) for rank in range(ranks)):
            pass
        working = [rank for rank in range(ranks) if left[rank]]
        awaited = [when - now for when in arrivals.values() if when > now]
        if not working and not awaited:
            return now
        slower = pace(len(working)) if working else 1.0
        # Advance to the next end of a pass or arrival of a message, when others may begin.
        passed = min([*awaited, *(slower * left[rank] for rank in working)])
        now += passed
        for rank in working:
            rest = left[rank] - passed / slower
            left[rank] = rest if rest > 1e-9 * left[rank] else 0.0
