"""Data parallelism: each rank takes its rows of the batch, and all ranks add up their gradients.

The loss of a batch is a mean over its rows, so its gradient is a sum to which every row contributes. Each
rank computes the part of its own rows, and an all-reduce for each parameter adds up the parts. Now all ranks
have the gradient of the whole batch and make the same update, so their models stay the same.

A rank sends 2 (n - 1) / n S bytes in a step, in one message for each parameter: n ranks, S bytes of
parameters. A batch has at least n rows. If n does not divide them, the parts differ in size: a rank's mean
loss then counts by its share of the rows.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section
3.2.1.
Lesson: 09 "Data parallel"
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train `model` in place on this rank's rows of each batch, and return the losses of whole batches."""
    rank, ranks = comm.rank(), comm.size()
    for p in model.parameters():
        comm.broadcast(p.detach())  # all ranks start from rank 0's parameters
    optimizer, losses = make_optimizer(model.parameters()), []
    for batch in batches:
        # Compute: this rank's part of the loss, and the part's gradient.
        inputs, targets = (whole.tensor_split(ranks)[rank] for whole in batch)  # (B / n, T)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])
        loss.backward()
        # Communicate: add up the parts of all ranks.
        for p in model.parameters():
            comm.all_reduce(p.grad)
        # Update: the same on every rank.
        optimizer.step()
        losses.append(loss.detach())
    return comm.all_reduce(torch.stack(losses)).tolist()
