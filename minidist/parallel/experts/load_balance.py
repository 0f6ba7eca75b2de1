"""Balance the experts' load without a loss: move each router's bias towards the mean (Wang et al. 2024).

A router counts the tokens of each expert in the backward pass (model/mixture_of_experts.py). After the step
the counts of all ranks are added up, and each expert's bias moves by the rate: up if it got fewer tokens than
the mean, down if it got more.
"""

from __future__ import annotations

import torch
from torch import nn

from minidist import comm
from minidist.comm.work import Group
from minidist.model.mixture_of_experts import Router


@torch.no_grad()
def balance_experts(model: nn.Module, group: Group = None) -> None:
    """Move the biases of all routers, and count anew. A collective of the ranks that share the tokens.

    Sends 2 (n - 1) / n 8 E bytes for each router with a rate; nothing if there is none.
    """
    routers = [part for part in model.modules() if isinstance(part, Router) and part.balance_rate]
    if not routers:
        return
    counts = comm.all_reduce(torch.cat([router.counts for router in routers]), group=group)
    sizes = [len(router.counts) for router in routers]
    for router, count in zip(routers, torch.split(counts, sizes), strict=True):
        mean = count.double().mean()
        router.bias += router.balance_rate * (mean - count).sign().to(router.bias.dtype)
        router.counts.zero_()
