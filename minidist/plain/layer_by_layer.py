"""Layer by layer: each rank holds some of the layers, and a batch goes through the ranks one after the other.

Rank 0 computes the first layers and sends their output to rank 1, and so on to the last rank, which computes
the loss. Gradients come back the same way: each rank receives the gradient of its output, and sends that of
its input. Together the ranks can train a model that is too large for any of them, though in the ladder all
have it whole before and after. But only one rank works at a time (4 ranks, F forward, B backward, time to the
right):

    rank 0  F . . . . . . B
    rank 1  . F . . . . B .
    rank 2  . . F . . B . .
    rank 3  . . . F B . . .

In a step every rank but the last sends A bytes to the next rank, and every rank but the first sends A bytes
to the one before: A is the bytes of the activations between two layers, B T D elements. A model has at least
as many layers as there are ranks.

Source: Huang et al. 2019, "GPipe", section 1 and figure 2b.
Lesson: 12 "Cutting the model"
"""

from collections.abc import Sequence

import torch
from torch import nn

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights


def own_layers(model: nn.Sequential, rank: int) -> nn.Sequential:
    """Return a rank's part of the model: consecutive layers, about as many on each rank."""
    layers, n = list(model), comm.size()
    return nn.Sequential(*layers[len(layers) * rank // n : len(layers) * (rank + 1) // n])


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train this rank's layers of `model` in place, fetch the others, and return the losses."""
    same_weights(model)
    rank, last, layers = comm.rank(), comm.size() - 1, own_layers(model, comm.rank())
    embedding = next(model.parameters())  # (V, D): messages have its D and dtype
    optimizer, losses = make_optimizer(layers.parameters()), []
    for inputs, targets in batches:  # (B, T) both
        optimizer.zero_grad()
        # Forward: receive the input, compute, send the output on.
        x = inputs
        if rank > 0:
            x = comm.recv(embedding.new_empty(*inputs.shape, embedding.shape[1]), rank - 1)  # (B, T, D)
            x.requires_grad_()
        y = layers(x)
        if rank < last:
            comm.send(y.detach(), rank + 1)
        loss = loss_of(y, targets) if rank == last else y.new_zeros(())
        # Backward: receive the output's gradient, compute, send the input's gradient back.
        if rank == last:
            loss.backward()
        else:
            y.backward(comm.recv(torch.empty_like(y), rank + 1))
        if rank > 0:
            comm.send(x.grad, rank - 1)
        # Update: each rank its own layers.
        optimizer.step()
        losses.append(loss.detach())
    for owner in range(last + 1):
        same_weights(own_layers(model, owner), owner)  # the caller gets the whole model
    return comm.all_reduce(torch.stack(losses)).tolist()  # the other ranks add zeros to the last one's
