"""Seconds of a schedule that is asked for with many times: its order is found once, and then only added up.

`schedules.simulate` takes any schedule, so it first proves that it is one, and it keeps a time line. A
planner asks hundreds of times for each of the library's own, which tests/parallel/pipeline/test_schedules.py
proves, and wants one number, the end: planning gpt2-xl on 64 ranks takes 9 s so, and 23 s with simulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from minidist.parallel.pipeline.instructions import Schedule, StageMessage, stage_of
from minidist.parallel.pipeline.replay import replay
from minidist.scale.memory.estimates import schedule_of

Seconds = Mapping[str, Sequence[Sequence[float]]]
"""For each kind of pass, for each stage, of each micro-batch."""
ALONE = -1


class TimedPass(NamedTuple):
    """A pass, behind all those that it waits for."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    waits: int  # for the message of which pass before, by its number; ALONE for none


def seconds_of(passes: Sequence[TimedPass], ranks: int, seconds: Seconds, message: float) -> float:
    """Seconds until the last rank's last pass ends, as `schedules.simulate` finds them.

    Args:
        passes: see `passes_of`.
        ranks: that the schedule has.
        seconds: see `Seconds`.
        message: seconds from a send to its arrival.
    """
    clocks, ends = [0.0] * ranks, list[float]()
    for rank, kind, stage, micro_batch, waits in passes:
        start = clocks[rank]
        if waits != ALONE:
            start = max(start, ends[waits] + message)
        clocks[rank] = end = start + seconds[kind][stage][micro_batch]
        ends.append(end)
    return max(clocks)


@lru_cache(maxsize=256)
def passes_of(name: str, ranks: int, micro_batches: int, chunks: int) -> list[TimedPass]:
    """The passes of a schedule by name, in an order in which they can be executed; not to be changed."""
    return _ordered(schedule_of(name, ranks, micro_batches, chunks))


def _ordered(schedule: Schedule) -> list[TimedPass]:
    """The passes of a schedule whose messages lie beside their passes, as `with_messages` puts them."""
    ranks = len(schedule)
    waits, latest = [ALONE] * ranks, [ALONE] * ranks  # each rank's message to wait for; its last pass
    made: dict[StageMessage, int] = {}
    found: list[TimedPass] = []
    for rank, each, message in replay(schedule):
        if message is None:
            stage = stage_of(rank, each.chunk, ranks)
            latest[rank] = len(found)
            found.append(TimedPass(rank, each.kind, stage, each.micro_batch, waits[rank]))
            waits[rank] = ALONE
        elif each.kind.startswith("send"):
            made[message] = latest[rank]
        else:
            waits[rank] = made[message]
    return found
