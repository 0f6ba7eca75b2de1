"""Local SGD: every rank trains by itself, and every k steps the ranks average their parameters.

Data parallelism sends gradients in every step. Here a rank updates its own copy of the model with its own
gradient, and sends its parameters in every k-th step only: on average 2 (n - 1) / n S / k bytes in a step,
for n ranks and S bytes of parameters. In between the copies drift apart, so the result is no longer that of
one process, unless k is 1, the optimizer is plain SGD and all ranks have as many rows: then the mean of
x - lr g over the ranks is x - lr (mean of g). A batch has at least n rows.

DiLoCo takes the way from the mean back to the anchor, where all ranks began, as the gradient of an outer
optimizer. A step of rate 1 is the average itself; momentum allows a large k, such as 500.

Sources: Stich 2019, "Local SGD Converges Fast and Communicates Little"; Douillard et al. 2023, "DiLoCo".
Lesson: 11 "Waiting or not"
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights

DILOCO = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def train(
    model: nn.Sequential,
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    k: int = 4,
    make_outer: MakeOptimizer | None = None,
) -> list[float]:
    """Train `model` in place on this rank's rows; average after every k-th step, and after the last."""
    rank, ranks = comm.rank(), comm.size()
    same_weights(model)
    x = parameters_to_vector(model.parameters()).detach()  # all parameters in one message
    vector_to_parameters(x, model.parameters())
    if make_outer is not None:
        outer = make_outer([anchor := nn.Parameter(x.clone())])
    optimizer, losses = make_optimizer(model.parameters()), []
    for step, batch in enumerate(batches, start=1):
        # Compute and update, without the other ranks.
        inputs, targets = (whole.tensor_split(ranks)[rank] for whole in batch)  # (B / n, T)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        # Communicate: the model's parameters are views of x.
        if step % k == 0 or step == len(batches):
            comm.all_reduce(x, "mean")
            if make_outer is not None:
                anchor.grad = anchor.detach() - x
                outer.step()
                x.copy_(anchor.detach())
        losses.append(loss.detach() * len(inputs) / len(batch[0]))
    return comm.all_reduce(torch.stack(losses)).tolist()
