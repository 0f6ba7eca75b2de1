"""The errors of checkpoints, and how all ranks come to raise the same one.

When one rank's disk is full, the others have written their files, but no rank has a checkpoint, and all have
to say so. Everything that may fail on one rank alone runs through `agree`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from minidist import comm
from minidist.comm.errors import failed

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or does not fit what it is loaded into."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not whole: the file that the message names is missing, cut short or altered."""


def agree(function: Callable[[], T], doing: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `function` on every rank, and return what each rank's returned; an error is raised on all ranks.

    The results are sent pickled. They come from the ranks, never from a file.

    function: makes no collective. doing: what it does, such as "write /runs/7", for the error.

    Raises:
        ValueError, TypeError, CheckpointError: as the first rank's function raised it; any other error as a
            CheckpointError.
        CollectiveError: a peer is gone or late.
    """
    outcome: Any
    try:
        outcome = (True, function())
    except Exception as error:
        outcome = (False, _explained(error, comm.rank(), doing))
    outcomes: list[Any] = [outcome]
    if comm.size() > 1:
        outcomes *= comm.size()
        try:
            dist.all_gather_object(outcomes, outcome, group)
        except RuntimeError as error:
            raise failed(f"what it takes to {doing}", range(comm.size()), error) from error
    for good, value in outcomes:
        if not good:
            raise value
    return [value for _, value in outcomes]


def _explained(error: Exception, rank: int, doing: str) -> Exception:
    """Return the error for all ranks, in one sentence, for what went wrong on one."""
    if type(error) in (ValueError, TypeError, CheckpointError, DamagedCheckpoint):
        return error
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, FileNotFoundError) and rank and doing.startswith("write "):
        why += "; rank 0 has made it, and all hosts have to see it: give a folder on a disk that they share"
    return CheckpointError(f"rank {rank} could not {doing}: {why}")
