"""Send the loss from the last rank of a pipeline, which computes it, to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.pipeline.stage_messages import next_run

FIRST_TAG = 2**30
"""The first tag of these messages, above those of the stages. Each step uses the next one."""


@contextmanager
def broadcast_loss(group: Group, device: torch.device) -> Iterator[Callable[[Tensor], float]]:
    """Yield a function that gives all ranks the last rank's total, a float64 scalar; sends 8 (p - 1) bytes.

    The other ranks post their receives on entry, so that the last rank does not wait for them. Each step has
    its own tag, so that a message of a failed step is never taken for that of a later one.
    """
    rank, last = rank_in(group), len(ranks_of(group)) - 1
    tag = FIRST_TAG + next_run(group)
    coming: comm.Work | None = None
    if rank < last:
        room = torch.empty((), dtype=torch.float64, device=device)
        coming = comm.recv(room, last, tag, group, async_op=True)

    def tell(total: Tensor) -> float:
        if coming is not None:
            return float(coming.wait())
        for work in [comm.send(total, other, tag, group, async_op=True) for other in range(last)]:
            work.wait()
        return float(total)

    try:
        yield tell
    except BaseException:
        if coming is not None:
            coming.forget()
        raise
