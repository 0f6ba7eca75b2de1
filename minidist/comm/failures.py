"""Why the backend could not complete a call, in words."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidist.comm.errors import CollectiveError


def failed(what: str, ranks: Sequence[int], error: RuntimeError) -> CollectiveError:
    """The error for a call that the backend could not complete, with the reason in words."""
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
    elif "scalar type" in text:
        reason = "the backend cannot send this dtype; convert the tensor first, as in x.to(torch.int32)"
    else:
        reason = text
    return CollectiveError(
        f"{what} on rank {dist.get_rank()} with ranks {', '.join(map(str, ranks))}: {reason}"
    )


def described(x: torch.Tensor) -> str:
    """A tensor in an error: float32[3x4]."""
    return describe_tensor(str(x.dtype).removeprefix("torch."), x.shape)


def describe_tensor(dtype: str, shape: Sequence[int]) -> str:
    """A tensor of this dtype and shape in an error: float32[3x4]."""
    return f"{dtype}[{'x'.join(map(str, shape)) or 'scalar'}]"
