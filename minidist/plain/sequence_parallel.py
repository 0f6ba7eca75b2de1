"""Sequence parallelism: what tensor parallelism leaves whole is shared along the tokens.

With tensor parallelism every rank has the activations between two pairs of matrices for all tokens. But norms
and sums treat each token by itself, so here a rank has only T / n of the tokens there. The all-reduce splits
in two: a reduce-scatter where activations leave a pair, and an all-gather where they enter the next.

    forward    own tokens ── gather ── own outputs ── own inputs ── scatter ── own tokens
    backward   the same from right to left: scatter gathers gradients, and gather scatters them

In a step a rank sends 8 L (n - 1) / n A bytes of activations, as with tensor parallelism, and 2 (n - 1) / n R
for the gradients of parameters that are not cut: n ranks, L blocks, A and R the bytes of the activations
between two blocks and of these parameters. n divides the heads and T.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.
Lesson: 13 "Tensor and sequence parallel"
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from minidist import comm
from minidist.plain.gpt import Batch, Block, MakeOptimizer, loss_of, same_weights


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


def own_inputs(layer: nn.Linear, x: Tensor) -> Tensor:  # (B, T, in / n) -> (B, T / n, D)
    """Add up what the ranks find with their inputs, and then the bias, so that it is added once."""
    return scatter(linear(x, layer.weight)) + layer.bias


class SharedBlock(Block):
    """A block of which each rank has an n-th: of the matrices inside a pair, of the tokens outside."""

    def forward(self, x: Tensor) -> Tensor:  # (B, T / n, D)
        """Return the block's output for this rank's tokens."""
        x = x + own_inputs(self.attention.out, self.attention.mix(gather(self.norm1(x))))
        return x + own_inputs(self.down, gelu(self.up(gather(self.norm2(x)))))


def cut_of(block: Block) -> dict[Tensor, int]:
    """Map each parameter of which a rank has a part to the dimension that is cut: 0 outputs, 1 inputs."""
    a = block.attention
    first = {p: 0 for layer in (a.query, a.key, a.value, block.up) for p in layer.parameters()}
    return first | {a.out.weight: 1, block.down.weight: 1}


def cut(block: Block) -> None:
    """Keep this rank's parts. The block and its layers stay the same objects, with another forward pass."""
    for p, dim in cut_of(block).items():
        p.data = p.data.chunk(comm.size(), dim)[comm.rank()].clone()
    block.attention.heads //= comm.size()
    block.__class__ = SharedBlock


def join(block: Block) -> None:
    """Put the parts together again, and give the block its own forward pass back."""
    for p, dim in cut_of(block).items():
        p.data, p.grad = comm.all_gather(p.data.transpose(0, dim)).transpose(0, dim).contiguous(), None
    block.attention.heads *= comm.size()
    block.__class__ = Block


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train this rank's parts of `model` in place, join all parts, and return the losses."""
    same_weights(model)
    rank, n, blocks = comm.rank(), comm.size(), [layer for layer in model if isinstance(layer, Block)]
    for block in blocks:
        cut(block)
    parts = {p for block in blocks for p in cut_of(block)}
    optimizer, losses = make_optimizer(model.parameters()), []
    for batch in batches:
        # Compute: what this rank's tokens contribute to the mean loss, and to the gradients.
        inputs, targets = (tokens.chunk(n, dim=1)[rank] for tokens in batch)  # (B, T / n)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) / n
        loss.backward()
        # Communicate: add up what all tokens contribute to the parameters that every rank has whole.
        for p in model.parameters():
            if p not in parts:
                comm.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.detach())
    for block in blocks:
        join(block)
    return comm.all_reduce(torch.stack(losses)).tolist()
