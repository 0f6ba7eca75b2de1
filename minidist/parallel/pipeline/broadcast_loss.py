"""The last rank of a pipeline knows the loss; here the others hear of it, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.pipeline.stage_messages import next_run

FIRST_TAG = 2**30
"""Of these messages, above those of the stages; each step has the next."""


@contextmanager
def broadcast_loss(group: Group, device: torch.device) -> Iterator[Callable[[Tensor], float]]:
    """Inside, a function that gives all ranks the last one's total, a float64 scalar: 8 (p - 1) bytes.

    The others' receive is posted at the beginning: the last rank then need not wait for them. Each step has a
    tag of its own, so that what a failed one has left is never taken for another's.
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
