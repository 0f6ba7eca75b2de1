"""Pipeline schedules: in which order each rank runs forward and backward passes of the micro-batches.

A schedule is data, a list of instructions for each rank (instructions.py). It can therefore be proved
(schedule_proof.py), simulated (simulation.py) and drawn (schedule_plot.py) without a process. `Pipeline`
executes it, or a schedule of your own. contract/schedule_kinds.py holds what is true of each by name.

With p ranks, m micro-batches, v chunks a rank and equal stages, the share of time in which ranks wait is:

| Schedule | Bubble | Live micro-batches on rank r | Source |
|---|---|---|---|
| `gpipe` | (p - 1) / (m + p - 1) | m | Huang et al. 2019, 2.3 |
| `one_f_one_b` | (p - 1) / (m + p - 1) | min(m, p - r) | Narayanan et al. 2019, 3.2 |
| `interleaved` | (p - 1) / (v m + p - 1) | (v - 1) p + 2 (p - r) - 1 chunks | Narayanan et al. 2021, 2.2 |
| `zero_bubble` | (p - 1) / (3 m + p - 1) if F, I, W take the same time | min(m, p) | Qi et al. 2023, ZB-H1 |

All raise ValueError for sizes below 1; only `gpipe` and `interleaved` take several chunks. Nothing here needs
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from minidist._arguments import check_whole
from minidist.parallel.contract.schedule_kinds import SCHEDULES, schedule_kind
from minidist.parallel.pipeline.instructions import Instruction, Schedule, require_schedule, sizes, stage_of
from minidist.parallel.pipeline.replay import Deadlock, replay
from minidist.parallel.pipeline.schedule_plot import plot
from minidist.parallel.pipeline.schedule_proof import check
from minidist.parallel.pipeline.simulation import Event, Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Event",
    "Instruction",
    "Schedule",
    "Simulation",
    "by_name",
    "check",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "plot",
    "simulate",
    "with_messages",
    "zero_bubble",
]


def gpipe(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """All forward passes, then all backward passes (GPipe). In between, every activation is live.

    With several chunks, all micro-batches go through one chunk before the next chunk begins.
    """
    _check_sizes(ranks, micro_batches, chunks)
    passes = [("forward", chunk) for chunk in range(chunks)]
    passes += [("backward", chunk) for chunk in reversed(range(chunks))]
    order = [Instruction(kind, i, chunk) for kind, chunk in passes for i in range(micro_batches)]
    return with_messages([order] * ranks)


def one_f_one_b(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """One forward and one backward pass in turn (1F1B), after a forward pass for each rank that follows.

    The bubble is that of GPipe. But a backward pass frees activations before the next forward pass makes new
    ones, so rank r never holds more than `ranks - r` micro-batches.
    """
    _check_sizes(ranks, micro_batches, chunks, most_chunks=1)
    order = [(i, 0) for i in range(micro_batches)]
    return with_messages([_alternating(order, order, ranks - 1 - rank) for rank in range(ranks)])


def interleaved(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """1F1B with several chunks a rank: the pipeline fills and drains by chunks, so chunks divide the bubble.

    Micro-batches go in groups, one micro-batch for each rank: a group passes all of a rank's chunks before
    the next group begins. If the ranks do not divide the micro-batches, the last group is smaller, and ranks
    start with as many more forward passes as it takes to avoid a deadlock.
    """
    _check_sizes(ranks, micro_batches, chunks)
    if chunks == 1:
        return one_f_one_b(ranks, micro_batches)
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    forwards = [(i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backwards = [(i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    for longer in range(len(forwards)):
        warm_ups = [(chunks - 1) * ranks + 2 * (ranks - 1 - rank) + longer for rank in range(ranks)]
        schedule = with_messages([_alternating(forwards, backwards, warm_up) for warm_up in warm_ups])
        try:
            for _ in replay(schedule):
                pass
        except Deadlock:
            continue
        return schedule
    raise AssertionError("with all forward passes first there is no deadlock")


def zero_bubble(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """1F1B with the backward pass in two: no rank waits for the weights' gradients, so they fill the bubble.

    This is ZB-H1: rank r postpones the weights' gradients of r micro-batches, so that it never holds more
    activations than rank 0 does in 1F1B. With times F, I and W of the three passes, I and F at least W, each
    rank waits for (p - 1) (F + I - W), and for (p - 1) (F + I + W) in 1F1B.
    """
    _check_sizes(ranks, micro_batches, chunks, most_chunks=1)
    compute, passes = [], [(i, 0) for i in range(micro_batches)]
    for rank in range(ranks):
        order: list[Instruction] = []
        for each in _alternating(passes, passes, ranks - 1 - rank):
            if each.kind == "forward":
                order.append(each)
                continue
            order.append(Instruction("backward_input", each.micro_batch))
            if each.micro_batch >= rank:
                order.append(Instruction("backward_weight", each.micro_batch - rank))
        left = range(max(0, micro_batches - rank), micro_batches)
        compute.append([*order, *(Instruction("backward_weight", i) for i in left)])
    return with_messages(compute)


def forward_only(schedule: Schedule) -> list[list[Instruction]]:
    """The forward passes of a schedule and their messages, for evaluation."""
    require_schedule(schedule)
    kept = ("forward", "send_forward", "recv_forward")
    return [[each for each in rank if each.kind in kept] for rank in schedule]


def with_messages(compute: Schedule) -> list[list[Instruction]]:
    """A schedule from its passes: a receive is put before the pass that needs it, a send after its pass.

    Raises ValueError if `compute` has messages already.
    """
    require_schedule(compute)
    for rank, own in enumerate(compute):
        message = next((each for each in own if not each.computes), None)
        if message is not None:
            raise ValueError(
                f"the schedule has {message} for rank {rank} already; give what they compute alone"
            )
    ranks, _, chunks = sizes(compute)
    last = ranks * chunks - 1
    instruction = cache(Instruction)  # several ranks have equal messages: make each once
    schedule: list[list[Instruction]] = []
    for rank, own in enumerate(compute):
        schedule.append([])
        for each in own:
            stage, which = stage_of(rank, each.chunk, ranks), (each.micro_batch, each.chunk)
            kind, first_end, last_end = (
                ("forward", 0, last) if each.kind == "forward" else ("backward", last, 0)
            )
            sends = ranks > 1 and each.kind != "backward_weight"
            if sends and stage != first_end:
                schedule[-1].append(instruction(f"recv_{kind}", *which))
            schedule[-1].append(each)
            if sends and stage != last_end:
                schedule[-1].append(instruction(f"send_{kind}", *which))
    return schedule


def by_name(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """The schedule of a name in `SCHEDULES`; ValueError if it is unknown, or does not take these sizes."""
    schedule: list[list[Instruction]] = schedule_kind(name)(ranks, micro_batches, chunks)
    return schedule


def _alternating(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warm_up: int
) -> list[Instruction]:
    """`warm_up` forward passes, then one forward and one backward in turn, then the other backward passes."""
    warm_up = min(warm_up, len(forwards))
    order = [Instruction("forward", *each) for each in forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [Instruction("forward", *forward), Instruction("backward", *backward)]
    return order + [Instruction("backward", *each) for each in backwards[len(forwards) - warm_up :]]


def _check_sizes(ranks: int, micro_batches: int, chunks: int, most_chunks: int | None = None) -> None:
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        check_whole(name, value, 1)
    if most_chunks is not None and chunks > most_chunks:
        raise ValueError(f"chunks is {chunks}, and this schedule has one chunk a rank; take interleaved")
