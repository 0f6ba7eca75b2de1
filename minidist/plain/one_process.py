"""One process: the loop that every other rung must equal.

A step computes the loss of a batch, the gradient of every parameter, and the optimizer's update. The other
rungs share this work among several ranks. In float64 they reach the same losses and parameters to 1e-10,
since only the order of their sums differs.

Sends nothing.
Lesson: 07 "A network on your own matmul"
"""

from collections.abc import Sequence

from torch import nn

from minidist.plain.gpt import Batch, MakeOptimizer, loss_of


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train `model` in place, one step for each batch, and return the losses."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for inputs, targets in batches:  # (B, T) both
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
