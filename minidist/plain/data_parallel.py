"""Data parallelism: each rank takes its rows of the batch, and all ranks add up their gradients.

The loss of a batch is a mean over its rows, so its gradient is a sum to which every row contributes. Each
rank computes the part of its own rows, and an all-reduce for each parameter adds up the parts. Now all ranks
have the gradient of the whole batch and make the same update, so their models stay the same.

Why weigh a rank's loss, and then add up? The loss is a mean over the rank's own rows. Times the rank's share
of the rows, it is what these rows contribute to the mean over the batch. So the contributions add up to that
mean, and their gradients to its gradient. The mean of the ranks' means is the same only if n divides the
rows: of 5 rows on 2 ranks, each row of the rank with 2 would count more.

A rank sends 2 (n - 1) / n S bytes in a step, in one message for each parameter: n ranks, S bytes of
parameters. A batch has at least n rows.

Source: Li et al. 2020, "PyTorch Distributed", section 3.2.1.
Lesson: 09 "Data parallel"
"""

from collections.abc import Sequence

import torch
from torch import nn

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train `model` in place on this rank's rows of each batch, and return the losses of whole batches."""
    rank, ranks = comm.rank(), comm.size()
    same_weights(model)
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
