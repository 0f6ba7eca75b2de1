"""Seconds of a pipeline's schedule: with a device for each rank, or with ranks that share a host's cores.

The order of the passes, and who waits for whom, is found once for a schedule and then only added up, since a
planner asks for each schedule hundreds of times and needs one number. `schedules.simulate` also proves that
a schedule is valid, and keeps a time line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from minidist.parallel.contract.schedule_kinds import schedule_kind
from minidist.parallel.schedules.instructions import StageMessage, placement_of
from minidist.parallel.schedules.schedule_proof import replay
from minidist.scale.memory.estimates import moments_of, schedule_of

Seconds = Mapping[str, Sequence[Sequence[float]]]
"""By kind of pass, stage and micro-batch."""
NONE = -1


class StageTimes(NamedTuple):
    """Seconds of one micro-batch's passes through one part of the model, on one rank."""

    forward: float  # computation and messages of the forward pass
    backward: float  # the same of the backward pass, with recomputation
    weights: float  # the part of the backward pass that computes gradients of weights
    parts: dict[str, float]  # both passes by purpose

    @property
    def whole(self) -> float:
        """Both passes."""
        return self.forward + self.backward


class TimedPass(NamedTuple):
    """A pass in a list in which it comes after all passes that it waits for."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    waits: int  # index of the pass whose message it waits for, or NONE


@lru_cache(maxsize=256)
def passes_of(name: str, ranks: int, micro_batches: int, chunks: int) -> list[TimedPass]:
    """The passes of a schedule, in an order in which they can run; do not change the list."""
    schedule = schedule_of(name, ranks, micro_batches, chunks)
    stages, recorded = placement_of(schedule).stages, schedule_kind(name).placement(ranks, chunks).stages
    if stages != recorded:
        raise ValueError(
            f"{name} for {ranks} ranks, {micro_batches} micro-batches and {chunks} chunks has stages "
            f"{stages} on its ranks, and its record in SCHEDULES says {recorded}"
        )
    found: list[TimedPass] = []
    last, came = [NONE] * ranks, [NONE] * ranks  # for each rank its last pass, and that of the last message
    sent: dict[StageMessage, int] = {}  # after which pass
    for rank, each, message in replay(schedule):
        if message is None:
            stage = stages[rank][each.chunk]
            found.append(TimedPass(rank, each.kind, stage, each.micro_batch, came[rank]))
            last[rank], came[rank] = len(found) - 1, NONE
        elif each.kind.startswith("send"):
            sent[message] = last[rank]
        else:
            came[rank] = sent[message]
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


def least_seconds(
    form: tuple[str, int, int, int],
    stages: Sequence[StageTimes],
    busy: Sequence[float],
    weights: Sequence[float],
    message: float,
) -> float:
    """A bound below `seconds_of`, without a simulation. `form`: name, ranks, micro-batches and chunks.

    A rank cannot begin before the first micro-batch has come through the stages before it, and cannot end
    before the last one has gone back through them. In between it has its own passes, and where it holds at
    most L micro-batches of a stage, micro-batch i + L begins after i has gone to the last stage and back.

    stages: the least times of a micro-batch's passes, by stage. busy, weights: seconds of all
    passes, and of the gradients of weights in them, by rank.
    """
    name, ranks, micro_batches, chunks = form
    kind = schedule_kind(name)
    placement, splits = kind.placement(ranks, chunks), kind.splits_backward
    hops = [message * (a != b) for a, b in pairwise(placement.ranks)]
    down = [*accumulate(map(add, (each.forward for each in stages), hops), initial=0.0)]
    back = [each.backward - splits * each.weights for each in stages]
    up = [*accumulate(map(add, back, hops), initial=0.0)]
    last = splits * stages[0].weights  # after the last micro-batch has gone back
    live = most_live(name, ranks, micro_batches, chunks)
    found = 0.0
    for rank, own in enumerate(placement.stages):
        first = min(own)
        found = max(found, down[first] + busy[rank] + max(0.0, up[first] + last - splits * weights[rank]))
        for stage, held in zip(own, live[rank], strict=True):
            rounds, rest = divmod(micro_batches - 1, held)
            trip = down[-1] - down[stage] + up[-1] - up[stage] + stages[-1].forward + back[-1]
            again = rounds * (trip + splits * stages[stage].weights) + rest * stages[stage].forward
            found = max(found, down[stage] + again + trip + up[stage] + last)
    return found * (1 - 1e-9)  # rounded down


@lru_cache(maxsize=1024)
def most_live(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[int]]:
    """For each rank and chunk, how many micro-batches are live at a time at most."""
    moments = moments_of(name, ranks, micro_batches, 0, chunks)
    return [[max(1, *(live[chunk] for live, _ in own)) for chunk in range(chunks)] for own in moments]


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
