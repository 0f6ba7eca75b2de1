"""Sequence parallelism: what tensor parallelism leaves whole is shared along the tokens.

With tensor parallelism every rank still computes and keeps the activations between two pairs of matrices for
all tokens. But norms and sums treat each token by itself, so here a rank has only T / n of the tokens there.
An all-reduce is a reduce-scatter and then an all-gather: the first now stands where activations leave a pair,
the second where they enter the next pair, and together they send no more than the all-reduce did.

    forward    own tokens ── gather ── own outputs ── own inputs ── scatter ── own tokens
    backward   the same from right to left: scatter gathers gradients, and gather scatters them

In a step a rank sends 8 L (n - 1) / n A bytes of activations, as with tensor parallelism, and 2 (n - 1) / n R
for the gradients of parameters that are not cut: n ranks, L blocks, A the bytes of the activations between
two blocks, B T D elements, R the bytes of embedding, norms, head, and the biases of out and down. n divides
the heads and T.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.
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


class Gather(torch.autograd.Function):
    """Enter a pair of matrices: every rank gets all tokens. The backward pass is Scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # (B, T / n, D) -> (B, T, D)
        """All-gather along the tokens."""
        return comm.all_gather(x.transpose(0, 1)).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # (B, T, D) -> (B, T / n, D)
        """Reduce-scatter: all ranks have used our tokens, so their gradients add up."""
        return scatter(gradient)


class Scatter(torch.autograd.Function):
    """Leave a pair: add up the ranks' results, and give each rank its tokens. The backward pass is Gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T / n, D)
        """Reduce-scatter along the tokens."""
        return comm.reduce_scatter(x.transpose(0, 1)).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # (B, T / n, D) -> (B, T, D)
        """All-gather."""
        return gather(gradient)


gather: Callable[[Tensor], Tensor] = Gather.apply
scatter: Callable[[Tensor], Tensor] = Scatter.apply


def own_part(whole: Tensor, dim: int) -> nn.Parameter:
    """Return this rank's n-th of a tensor."""
    return nn.Parameter(whole.detach().chunk(comm.size(), dim)[comm.rank()].clone())


class OwnInputs(nn.Linear):
    """A linear layer that sees this rank's inputs only, and returns this rank's tokens."""

    def __init__(self, whole: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = own_part(whole.weight, 1), whole.bias  # (out, in / n), (out)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, in / n) -> (B, T / n, out)
        """Add the bias after the ranks' sum, so that it is added once."""
        return scatter(linear(x, self.weight)) + self.bias


class SharedBlock(Block):
    """A block of which each rank has an n-th: of the matrices inside a pair, of the tokens outside."""

    def __init__(self, whole: Block) -> None:
        nn.Module.__init__(self)
        self.norm1, self.attention, self.norm2 = whole.norm1, whole.attention, whole.norm2
        self.attention.heads //= comm.size()
        self.attention.out = OwnInputs(whole.attention.out)
        self.up, self.down = whole.up, OwnInputs(whole.down)
        for layer in (self.attention.query, self.attention.key, self.attention.value, self.up):
            layer.weight, layer.bias = own_part(layer.weight, 0), own_part(layer.bias, 0)  # own outputs

    def forward(self, x: Tensor) -> Tensor:  # (B, T / n, D)
        """Return the block's output for this rank's tokens."""
        x = x + self.attention(gather(self.norm1(x)))
        y: Tensor = x + self.down(gelu(self.up(gather(self.norm2(x)))))
        return y


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train this rank's parts of `model` in place, and return the losses."""
    rank, n, before = comm.rank(), comm.size(), set(model.parameters())
    for i, layer in enumerate(model):
        if isinstance(layer, Block):
            model[i] = SharedBlock(layer)
    whole = [p for p in model.parameters() if p in before]  # what the cut has not replaced
    optimizer, losses = make_optimizer(model.parameters()), []
    for batch in batches:
        # Compute: what this rank's tokens contribute to the mean loss, and to the gradients.
        inputs, targets = (tokens.chunk(n, dim=1)[rank] for tokens in batch)  # (B, T / n)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) / n
        loss.backward()
        # Communicate: add up what all tokens contribute to the parameters that every rank has whole.
        for p in whole:
            comm.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.detach())
    return comm.all_reduce(torch.stack(losses)).tolist()
