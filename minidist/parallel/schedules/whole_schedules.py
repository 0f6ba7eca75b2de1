"""How lists of passes become schedules: messages are added; a name chooses one of the records."""

from __future__ import annotations

import pkgutil

from minidist.parallel.contract.schedule_kinds import StagePlacement, schedule_kind
from minidist.parallel.schedules.instructions import (
    Instruction,
    PlacedSchedule,
    Schedule,
    instruction,
    only,
    placement_of,
    require_schedule,
)
from minidist.parallel.schedules.schedule_proof import messages_of


def by_name(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """The schedule of a name in `SCHEDULES`; ValueError if it is unknown, or does not take these sizes."""
    kind = schedule_kind(name)
    made: list[list[Instruction]] = pkgutil.resolve_name(kind.made_by)(ranks, micro_batches, chunks)
    passes = all(each.computes for own in made for each in own)
    return with_messages(made, kind.placement(ranks, chunks)) if passes else made


def with_messages(compute: Schedule, placement: StagePlacement | None = None) -> list[list[Instruction]]:
    """A schedule from its passes: a receive is put before the pass that needs it, a send after its pass.

    placement: which chunk of which rank each stage is; the schedule keeps it. None for that of `compute`, or
    else round robin. Raises ValueError if `compute` has messages already, or has other numbers of ranks or
    chunks than `placement`.
    """
    require_schedule(compute)
    for rank, own in enumerate(compute):
        message = next((each for each in own if not each.computes), None)
        if message is not None:
            raise ValueError(
                f"the schedule has {message} for rank {rank} already; give what they compute alone"
            )
    if placement is not None:
        compute = PlacedSchedule(map(list, compute), placement)
    where = placement_of(compute)
    schedule: list[list[Instruction]] = []
    for rank, own in enumerate(compute):
        kinds = [messages_of(rank, chunk, where) for chunk in range(len(where.stages[rank]))]
        schedule.append(found := [])
        for each in own:
            kind, needed = each.kind.removesuffix("_input"), kinds[each.chunk]
            if (receive := f"recv_{kind}") in needed:
                found.append(instruction(receive, each.micro_batch, each.chunk))
            found.append(each)
            if (send := f"send_{kind}") in needed:
                found.append(instruction(send, each.micro_batch, each.chunk))
    return PlacedSchedule(schedule, where) if isinstance(compute, PlacedSchedule) else schedule


def forward_only(schedule: Schedule) -> list[list[Instruction]]:
    """The forward passes of a schedule and their messages, for evaluation."""
    require_schedule(schedule)
    return only(schedule, lambda each: each.kind in ("forward", "send_forward", "recv_forward"))
