"""Why the backend could not complete a call, in words."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from minidist.comm.errors import CollectiveError

out_of_step: list[str] = []
"""The first error of a call that had begun here, if any. Other ranks may still be in that call, or its
messages on the way, so a `Cluster` runs nothing more in this process."""


@contextmanager
def noted() -> Iterator[None]:
    """Note a CollectiveError of a call that has begun."""
    try:
        yield
    except CollectiveError as error:
        note(str(error))
        raise


def note(text: str) -> None:
    """Note that the ranks are out of step from now on."""
    if not out_of_step:
        out_of_step.append(text)


def failed(
    what: str, ranks: Sequence[int], error: RuntimeError, leaves_traces: bool = True
) -> CollectiveError:
    """The error for a call that the backend could not complete, with the reason in words.

    leaves_traces: note that the ranks are out of step from now on.
    """
    text = str(error)
    if "imed out" in text:
        reason = (
            "the other ranks did not all make this call within the time limit; one may have skipped it, "
            "or still be computing: look there, or give a longer timeout="
        )
        here = os.environ.get("LOCAL_WORLD_SIZE", "")  # a launcher says how many ranks it started here
        if here.isdigit() and dist.is_initialized() and int(here) < dist.get_world_size():
            reason += "; or their hosts may no longer reach each other: try ping from one to the other"
    elif any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe", "refused")):
        reason = "another rank's process has ended; its own error says why"
    else:
        reason = text
    text = f"{what} on rank {dist.get_rank()} with ranks {', '.join(map(str, ranks))}: {reason}"
    if leaves_traces:
        note(text)
    return CollectiveError(text)


def described(x: torch.Tensor) -> str:
    """A tensor in an error: float32[3x4]."""
    return describe_tensor(str(x.dtype).removeprefix("torch."), x.shape)


def describe_tensor(dtype: str, shape: Sequence[int]) -> str:
    """A tensor of this dtype and shape in an error: float32[3x4]."""
    return f"{dtype}[{'x'.join(map(str, shape)) or 'scalar'}]"
