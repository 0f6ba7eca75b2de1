"""What can go wrong with a checkpoint, and how all ranks come to raise the same error.

One rank's disk is full, and the others have written their parts: none of them has a checkpoint then, and all
have to say so. Whatever may fail on one rank alone is run through `agree`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from minidist import comm
from minidist.comm.failures import failed

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or does not fit what it is loaded into."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not whole: a file is missing, cut short or altered. The message names it."""


def agree(function: Callable[[], T], doing: str) -> list[T]:
    """Run `function` on every rank; what it returned on each, or the first rank's error, on all of them.

    Sends what it returns to all ranks, pickled; that comes from the ranks and never from a file.

    Args:
        function: makes no collective.
        doing: what it does, such as "write /runs/7"; for the error's sentence.

    Raises:
        ValueError, TypeError, CheckpointError: as the function raised it; any other error as a
            CheckpointError.
        CollectiveError: a peer is gone or late.
    """
    outcome: Any
    try:
        outcome = (True, function())
    except Exception as error:
        outcome = (False, explained(error, comm.rank(), doing))
    outcomes: list[Any] = [outcome]
    if comm.size() > 1:
        outcomes *= comm.size()
        with peers(doing):
            dist.all_gather_object(outcomes, outcome)
    for good, value in outcomes:
        if not good:
            raise value
    return [value for _, value in outcomes]


@contextmanager
def peers(doing: str) -> Iterator[None]:
    """Inside, a collective of torch.distributed's own that fails is a CollectiveError, in words."""
    try:
        yield
    except RuntimeError as error:
        raise failed(f"what it takes to {doing}", range(comm.size()), error) from error


def explained(error: BaseException, rank: int, doing: str) -> Exception:
    """The error that all ranks raise, in one sentence, for what went wrong on one."""
    if type(error) in (ValueError, TypeError, CheckpointError, DamagedCheckpoint):
        return error  # type: ignore[return-value]
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, FileNotFoundError) and rank and doing.startswith("write "):
        why += "; rank 0 has made it, and all hosts have to see it: give a folder on a disk that they share"
    return CheckpointError(f"rank {rank} could not {doing}: {why}")
