"""What `Pipeline` refuses when it is made: arguments of the wrong type, in a sentence each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from minidist.parallel.pipeline.instructions import require_schedule


def check_stages(stages: object) -> list[nn.Module]:
    """This rank's modules, one a chunk; TypeError where they are none."""
    found = [*stages] if isinstance(stages, Sequence | nn.ModuleList) else []
    if not found or not all(isinstance(stage, nn.Module) for stage in found):
        raise TypeError(f"stages is {stages!r}; give this rank's module, or one for each chunk")
    return found


def check_arguments(schedule: object, loss: object, reduction: object, tied: object) -> None:
    """TypeError or ValueError where an argument cannot be what it has to be."""
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


def fingerprint(schedule: object) -> str:
    """A short text by which ranks tell two schedules apart."""
    return hashlib.sha256(repr(schedule).encode()).hexdigest()[:8]
