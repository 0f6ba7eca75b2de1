"""A pipeline whose ranks share cores: a rank that waits leaves its time to those that compute.

`schedules.simulate` gives each rank a device of its own. Where more ranks than cores run on one host, a
bubble is no loss as long as others have work: what counts is how many compute at a time. So here passes
progress together, each at the pace that as many leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minidist.parallel.pipeline.instructions import Instruction, Schedule, StageMessage, message_of, stage_of

Seconds = Mapping[str, Sequence[Sequence[float]]]
"""For each kind of pass, for each stage, of each micro-batch, while all ranks compute."""


def simulate(schedule: Schedule, seconds: Seconds, message: float, pace: Callable[[int], float]) -> float:
    """Seconds of a schedule.

    Args:
        schedule: for each rank its instructions; one that passes `schedules.check`.
        seconds: see `Seconds`.
        message: seconds from a send to its arrival.
        pace: seconds of a pass while so many ranks compute, over those while all do.
    """
    ranks = len(schedule)
    places, left = [0] * ranks, [0.0] * ranks  # the next instruction; what is left of the pass that runs
    arrivals: dict[StageMessage, float] = {}
    now = 0.0

    def cost(rank: int, each: Instruction) -> float:
        return seconds[each.kind][stage_of(rank, each.chunk, ranks)][each.micro_batch]

    def go_on(rank: int) -> bool:
        """Do what takes no time, up to the next pass; whether anything was done."""
        begun = places[rank]
        while not left[rank] and places[rank] < len(schedule[rank]):
            each = schedule[rank][places[rank]]
            if each.computes:
                left[rank] = cost(rank, each)
            else:
                _, what = message_of(each, rank, ranks)
                if each.kind.startswith("send"):
                    arrivals[what] = now + message
                elif arrivals.get(what, float("inf")) > now:
                    break
            places[rank] += 1
        return places[rank] > begun

    while True:
        while sum(go_on(rank) for rank in range(ranks)):  # all of them, and again while any went on
            pass
        working = [rank for rank in range(ranks) if left[rank]]
        awaited = [when - now for when in arrivals.values() if when > now]
        if not working and not awaited:
            return now
        slower = pace(len(working)) if working else 1.0
        # To the next pass's end, or to the next arrival: then others begin.
        passed = min([*awaited, *(slower * left[rank] for rank in working)])
        now += passed
        for rank in working:
            rest = left[rank] - passed / slower
            left[rank] = rest if rest > 1e-9 * left[rank] else 0.0
