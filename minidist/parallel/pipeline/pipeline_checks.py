"""The checks of `Pipeline`'s arguments, on this rank and over all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from minidist.comm.work import Group, ranks_of
from minidist.parallel.guards.refusals import require_alike
from minidist.parallel.schedules.instructions import Schedule, require_schedule, sizes
from minidist.parallel.schedules.schedule_proof import check

MICRO_BATCHES = 8
"""Micro-batches of a batch, unless the caller says otherwise."""


def check_stages(stages: object) -> list[nn.Module]:
    """This rank's modules, one for each chunk; TypeError for anything else."""
    if isinstance(stages, nn.Module) and not isinstance(stages, nn.ModuleList):
        return [stages]
    found = [*stages] if isinstance(stages, Sequence | nn.ModuleList) else []
    if not found or not all(isinstance(stage, nn.Module) for stage in found):
        raise TypeError(f"stages is {stages!r}; give this rank's module, or one for each chunk")
    return found


def check_pipeline_arguments(
    schedule: str | Schedule,
    micro_batches: int | None,
    chunks: int,
    loss: object,
    reduction: object,
    tied: Sequence[nn.Parameter | None],
    group: Group,
) -> int:
    """The number of micro-batches; TypeError or ValueError if an argument is wrong or ranks differ in one."""
    if not isinstance(schedule, str | Sequence):
        given = f"the function {schedule.__name__}" if hasattr(schedule, "__name__") else repr(schedule)
        raise TypeError(
            f"schedule is {given}; give a name such as '1f1b', or a list of instructions for each rank, as "
            "schedules.gpipe(ranks, micro_batches) makes one"
        )
    if not isinstance(schedule, str):
        require_schedule(schedule)
    if not callable(loss):
        raise TypeError(
            f"loss is {loss!r}; give a function from outputs and targets to a scalar, such as "
            "torch.nn.functional.cross_entropy"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; give 'mean' or 'sum', whichever the loss is")
    if not isinstance(tied, list | tuple) or not all(p is None or isinstance(p, nn.Parameter) for p in tied):
        kinds = [type(p).__name__ for p in tied] if isinstance(tied, list | tuple) else type(tied).__name__
        raise TypeError(
            f"tied is {kinds}; give a list with a parameter, or None, for each that several ranks hold a "
            "copy of"
        )
    # Ranks that follow different schedules would wait for messages that nobody sends.
    named = isinstance(schedule, str)
    fingerprint = hashlib.sha256(repr(schedule).encode()).hexdigest()[:8]
    alike = {
        "schedule": repr(schedule) if named else f"of your own, {fingerprint},",
        "micro_batches": micro_batches,
        "chunks": chunks,
        "reduction": reduction,
        "tied copies": len(tied),
    }
    require_alike("Pipeline", alike, group)
    if isinstance(schedule, str):
        return MICRO_BATCHES if micro_batches is None else micro_batches
    check(schedule, micro_batches, chunks)
    ranks = len(ranks_of(group))
    if len(schedule) != ranks:
        raise ValueError(f"the schedule is for {len(schedule)} ranks and the group has {ranks} ranks")
    return sizes(schedule)[1]
