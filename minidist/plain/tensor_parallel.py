"""Tensor parallelism: the ranks share the large matrices, and all work on the same tokens at the same time.

A block has two pairs of matrices: query, key and value with out, and up with down. Cut the first of a pair by
its outputs and the second by its inputs: then each rank computes its part of the pair without the others, and
one all-reduce adds up the results. This works because what lies inside a pair keeps the parts separate:
attention does if each rank has whole heads, and GELU looks at each element alone.

    forward    x ── enter ── own outputs ── own inputs ── leave ── y    leave adds up the ranks' results
    backward   the same from right to left                              enter adds up the ranks' gradients

Autograd does not see the other ranks, so `enter` and `leave` define their backward pass themselves; the paper
calls them f and g.

In a step a rank takes part in 4 L all-reduces of A bytes, two forward and two backward in each block, and so
sends 8 L (n - 1) / n A: n ranks, L blocks, A the bytes of the activations between two blocks, B T D elements.
n divides the heads. Every rank has the embedding, the norms and the head whole.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 and figure 3.
Lesson: 13 "Tensor and sequence parallel"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from minidist import comm
from minidist.plain.gpt import Batch, Block, MakeOptimizer, loss_of


class Enter(torch.autograd.Function):
    """Every rank has x whole, and finds only the gradient that comes through its part of the matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Pass x on."""
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """All-reduce."""
        return comm.all_reduce(gradient.clone())


class Leave(torch.autograd.Function):
    """Every rank has one summand of the result. All get the sum, and in the backward pass its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All-reduce."""
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient on."""
        return gradient


enter: Callable[[Tensor], Tensor] = Enter.apply
leave: Callable[[Tensor], Tensor] = Leave.apply


def own_part(whole: Tensor, dim: int) -> nn.Parameter:
    """Return this rank's n-th of a tensor."""
    return nn.Parameter(whole.detach().chunk(comm.size(), dim)[comm.rank()].clone())


class OwnInputs(nn.Linear):
    """A linear layer that sees this rank's inputs only. The bias is added once, after the ranks' sum."""

    def __init__(self, whole: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = own_part(whole.weight, 1), whole.bias  # (out, in / n), (out)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, in / n)
        """Return the whole output, (B, T, out), the same on all ranks."""
        return leave(linear(x, self.weight)) + self.bias


class SharedBlock(Block):
    """A block of which each rank has an n-th of the heads, and an n-th of the MLP's hidden units."""

    def __init__(self, whole: Block) -> None:
        nn.Module.__init__(self)
        self.norm1, self.attention, self.norm2 = whole.norm1, whole.attention, whole.norm2
        self.attention.heads //= comm.size()
        self.attention.out = OwnInputs(whole.attention.out)
        self.up, self.down = whole.up, OwnInputs(whole.down)
        for layer in (self.attention.query, self.attention.key, self.attention.value, self.up):
            layer.weight, layer.bias = own_part(layer.weight, 0), own_part(layer.bias, 0)  # own outputs

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D), the same on all ranks
        """Return the block's output, the same on all ranks."""
        x = x + self.attention(enter(self.norm1(x)))
        y: Tensor = x + self.down(gelu(self.up(enter(self.norm2(x)))))
        return y


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train this rank's parts of `model` in place, and return the losses."""
    for i, layer in enumerate(model):
        if isinstance(layer, Block):
            model[i] = SharedBlock(layer)
    optimizer, losses = make_optimizer(model.parameters()), []
    for inputs, targets in batches:  # (B, T) both
        # As in one process: enter and leave communicate. What is not cut has the same gradient on all ranks.
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
