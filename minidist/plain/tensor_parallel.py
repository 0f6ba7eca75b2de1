"""Tensor parallelism: the ranks share the large matrices, and all work on the same tokens at the same time.

A block has two pairs of matrices: query, key and value with out, and up with down. Cut the first of a pair by
its outputs and the second by its inputs: then each rank computes its part of the pair without the others, and
one all-reduce adds up the results. This works because what lies inside a pair keeps the parts separate:
attention does if each rank has whole heads, and GELU looks at each element alone.

    forward    x ── enter ── own outputs ── own inputs ── leave ── y    leave adds up the ranks' results
    backward   the same from right to left                              enter adds up the ranks' gradients

Autograd does not see the other ranks, so `enter` and `leave` (in the paper f and g) say what goes backward.

In a step a rank takes part in 4 L all-reduces of A bytes, two forward and two backward in each block, and so
sends 8 L (n - 1) / n A: n ranks, L blocks, A the bytes of the activations between two blocks, B T D elements.
n divides the heads. Every rank has the embedding, the norms and the head whole.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 and figure 3.
Lesson: 13 "Tensor and sequence parallel"
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from minidist import comm
from minidist.plain.gpt import Batch, Block, MakeOptimizer, loss_of, same_weights


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


def own_inputs(layer: nn.Linear, x: Tensor) -> Tensor:  # (B, T, in / n) -> (B, T, D)
    """Add up what the ranks find with their inputs, and then the bias, so that it is added once."""
    return leave(linear(x, layer.weight)) + layer.bias


class SharedBlock(Block):
    """A block of which each rank has an n-th of the heads, and an n-th of the MLP's hidden units."""

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D), the same on all ranks
        """Return the block's output, the same on all ranks."""
        x = x + own_inputs(self.attention.out, self.attention.mix(enter(self.norm1(x))))
        return x + own_inputs(self.down, gelu(self.up(enter(self.norm2(x)))))


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
    blocks = [layer for layer in model if isinstance(layer, Block)]
    for block in blocks:
        cut(block)
    optimizer, losses = make_optimizer(model.parameters()), []
    for inputs, targets in batches:  # (B, T) both
        # As in one process: enter and leave communicate. What is not cut has the same gradient on all ranks.
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for block in blocks:
        join(block)
    return losses
