"""Tensor parallelism: the ranks share every large matrix, and all of them work on the same token at once.

A block has two pairs of matrices: query, key and value with out, and up with down. Cut the first of a pair by
its outputs and the second by its inputs: then each rank computes its part of the pair without the others, and
one all-reduce adds up the results. This works because what lies inside a pair keeps the parts separate:
attention does if each rank has whole heads, and GELU looks at each element alone.

    forward    x ── f ── own outputs of the first ── own inputs of the second ── g ── y
               f passes x on; g adds up the ranks' results
    backward   from right to left: g passes the gradient on; f adds up the ranks' gradients

In a step a rank takes part in 4 L all-reduces of A bytes, two forward and two backward in each block, and so
sends 8 L (n - 1) / n A: n ranks, L blocks, A the bytes of the activations between two blocks, B T D elements.
n divides the heads. Every rank has the embedding, the norms and the head whole.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 and figure 3, from which the names f and g are.
Lesson: 12 "Tensor and sequence parallel"
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
    """f: every rank has x whole, and finds the gradient that its part of the matrices contributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Pass x on."""
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """All-reduce."""
        return comm.all_reduce(gradient.clone())


class Leave(torch.autograd.Function):
    """g: every rank has one summand of the result. All get the sum, and later the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """All-reduce."""
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient on."""
        return gradient


f: Callable[[Tensor], Tensor] = Enter.apply
g: Callable[[Tensor], Tensor] = Leave.apply


def own_part(whole: Tensor, dim: int) -> nn.Parameter:
    """Return this rank's n-th of a tensor."""
    return nn.Parameter(whole.detach().chunk(comm.size(), dim)[comm.rank()].clone())


def keep_own_outputs(layer: nn.Linear) -> None:
    """Keep what gives this rank's outputs: an n-th of the weight's rows, and of the bias."""
    layer.weight, layer.bias = own_part(layer.weight, 0), own_part(layer.bias, 0)  # (out / n, in), (out / n)


class OwnInputs(nn.Linear):
    """A linear layer that sees this rank's inputs only. The bias is added once, after the ranks' sum."""

    def __init__(self, whole: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = own_part(whole.weight, 1), whole.bias  # (out, in / n), (out)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, in / n)
        """Return the whole output, (B, T, out), the same on all ranks."""
        return g(linear(x, self.weight)) + self.bias


class SharedBlock(Block):
    """A block of which each rank has an n-th of the heads, and an n-th of the MLP's hidden units."""

    def __init__(self, whole: Block) -> None:
        nn.Module.__init__(self)
        self.norm1, self.attention, self.norm2 = whole.norm1, whole.attention, whole.norm2
        self.attention.heads //= comm.size()
        self.attention.out = OwnInputs(whole.attention.out)
        self.up, self.down = whole.up, OwnInputs(whole.down)
        for layer in (self.attention.query, self.attention.key, self.attention.value, self.up):
            keep_own_outputs(layer)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D), the same on all ranks
        """Return the block's output, the same on all ranks."""
        x = x + self.attention(f(self.norm1(x)))
        y: Tensor = x + self.down(gelu(self.up(f(self.norm2(x)))))
        return y


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train this rank's parts of `model` in place, and return the losses."""
    for i, layer in enumerate(model):
        if isinstance(layer, Block):
            model[i] = SharedBlock(layer)
    optimizer, losses = make_optimizer(model.parameters()), []
    for inputs, targets in batches:  # (B, T) both
        # As in one process: f and g communicate. What is not cut gets the same gradient on all ranks.
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
