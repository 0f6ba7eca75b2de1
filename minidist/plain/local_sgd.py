"""Local SGD: every rank trains by itself, and every k steps the ranks average their parameters.

Data parallelism sends gradients in every step. Here a rank updates its own copy of the model with its own
gradient, and sends its parameters in every k-th step only. In between the copies drift apart, so the
result is no longer that of one process, unless k is 1, the optimizer is plain SGD and all ranks have as many
rows: then the mean of x - lr g over the ranks is x - lr (mean of g).

A rank sends 2 (n - 1) / n S / k bytes in a step, on average: n ranks, S bytes of parameters. A batch has at
least n rows.

Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1.
Lesson: 11 "Waiting or not"
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, k: int = 4
) -> list[float]:
    """Train `model` in place on this rank's rows; average after every k-th step, and after the last."""
    rank, ranks = comm.rank(), comm.size()
    same_weights(model)
    x = parameters_to_vector(model.parameters()).detach()  # all parameters in one message
    vector_to_parameters(x, model.parameters())
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
        losses.append(loss.detach() * len(inputs) / len(batch[0]))
    return comm.all_reduce(torch.stack(losses)).tolist()
