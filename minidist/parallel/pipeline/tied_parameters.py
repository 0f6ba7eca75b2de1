"""Parameters that two or more ranks of a pipeline hold, such as the token table of a tied GPT.

Each rank's copy gets the gradient of its own use; the gradient of the one parameter is their sum. Copies that
start equal stay equal if they get equal gradients and equal optimizer steps. With data parallelism the sum
over the stages therefore comes last: a data-parallel sum over three or more ranks adds in an order that
depends on where in a bucket a gradient lies, and that differs from stage to stage.

Source: Shoeybi et al. 2019, "Megatron-LM"; Press and Wolf 2017 on tying the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import nn

from minidist import comm
from minidist.comm.work import Group, rank_in


def sum_tied(parameter: nn.Parameter | None, group: Group, ranks: Sequence[int]) -> None:
    """Add up the gradients of one parameter over the ranks that hold a copy, in each copy's `.grad`.

    Every holder sends its gradient, and whether it has one, to every other: (h - 1) (S + 1) elements for h
    holders and S elements. It adds them up in the order of the ranks, so that the sums are the same to the
    last bit. Other ranks do nothing.

    Args:
        parameter: this rank's copy, or None. A copy without a gradient counts as zeros, and where no copy has
            one, none gets one: an optimizer would let it decay. Frozen copies, which are frozen on all
            holders, are left alone.
        group: the ranks of the pipeline.
        ranks: the indices of the holders in the group; the same on all of them.
    """
    if parameter is None or len(ranks) < 2 or not parameter.requires_grad:
        return
    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    has_one = own.new_full((1,), float(parameter.grad is not None))
    message = torch.cat([own.reshape(-1), has_one])
    others = [rank for rank in ranks if rank != rank_in(group)]
    came = {rank: torch.empty_like(message) for rank in others}
    works = [comm.send(message, rank, group=group, async_op=True) for rank in others]
    works += [comm.recv(came[rank], rank, group=group, async_op=True) for rank in others]
    for work in works:
        work.wait()
    total = reduce(torch.add, (came.get(rank, message) for rank in ranks))
    if parameter.grad is not None or total[-1]:
        parameter.grad = own.copy_(total[:-1].view_as(own))


def start_tied_equal(parameter: nn.Parameter | None, group: Group) -> list[int]:
    """Give all copies of a parameter the first holder's values, and return the holders. All ranks call it."""
    held = comm.all_gather(torch.tensor([parameter is not None]), group=group)
    ranks = [rank for rank, holds in enumerate(held.tolist()) if holds]
    copy_from_first(parameter, group, ranks)
    return ranks


def copy_from_first(parameter: nn.Parameter | None, group: Group, ranks: Sequence[int]) -> None:
    """Copy a parameter's values from the first of `ranks`, which hold it, to the others.

    That rank sends (h - 1) S bytes for h holders. Other ranks do nothing.
    """
    if parameter is None or len(ranks) < 2:
        return
    with torch.no_grad():
        if rank_in(group) == ranks[0]:
            for rank in ranks[1:]:
                comm.send(parameter.detach(), rank, group=group)
        else:
            came = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            parameter.copy_(comm.recv(came, ranks[0], group=group))
