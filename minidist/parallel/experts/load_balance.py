"""Balance the experts' load without a loss: move each router's bias towards the mean (Wang et al. 2024).

A router counts the tokens of each expert in the backward pass (model/mixture_of_experts.py). After the step
the counts of all ranks are added up, and each expert's bias moves by the rate: up if it got fewer tokens than
the mean, down if it got more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minidist import comm
from minidist.comm.work import Group
from minidist.model.mixture_of_experts import Router


def balanced_routers(model: nn.Module) -> list[Router]:
    """The routers whose experts are to be balanced."""
    return [part for part in model.modules() if isinstance(part, Router) and part.balance_rate]


@torch.no_grad()
def balance_experts(routers: Sequence[Router], group: Group = None, *more: Group) -> None:
    """Move the routers' biases, and count anew: after each step. A collective of the ranks that share tokens.

    Sends 2 (n - 1) / n 8 E bytes for each router, at least one, over the group; and so over each further one.
    """
    counted = [torch.zeros_like(router.bias, dtype=torch.int64) + router.counts for router in routers]
    counts = torch.cat(counted)
    for each in (group, *more):
        counts = comm.all_reduce(counts, group=each)
    for router, count in zip(routers, torch.split(counts, [*map(len, counted)]), strict=True):
        mean = count.double().mean()
        router.bias += router.balance_rate * (mean - count).sign().to(router.bias.dtype)
        router.counts = 0
