"""Ulysses: the ranks share a row along its tokens, but for attention, where they share the heads.

As in ring attention every rank has all parameters and T / n tokens of each row. Attention needs all tokens,
but each head works alone. So before attention an all-to-all trades: a rank gives away its tokens' queries,
keys and values of all heads but its own H / n, and gets those of its heads for all tokens. It attends to
whole rows, as one process does, and a second all-to-all brings the results back to their tokens' ranks.

    tokens of rank 0, all heads ──╲  ╱── all tokens, heads 0 and 1 ── attention ──╲  ╱── as before
                                   ╳                                               ╳
    tokens of rank 1, all heads ──╱  ╲── all tokens, heads 2 and 3 ── attention ──╱  ╲── as before

In a step a rank sends 8 (n - 1) / n^2 A bytes for each block, forward and backward, and 2 (n - 1) / n S for
the gradients of the parameters: n ranks, A the bytes of a row's activations, B T D elements, S those of the
parameters. A ring sends 6 (n - 1) / n A for a block, but in the background, and more ranks than heads can
form one. All ranks' work is the same, since each has whole rows. n divides T and H.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models", section 3.
Lesson: 15 "All together"
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minidist import comm
from minidist.plain.gpt import Attention, Batch, Block, MakeOptimizer, loss_of, same_weights

HEADS, TOKENS = -3, -2


class Trade(torch.autograd.Function):
    """Cut `x` along one dimension, give each rank its piece, and join what comes along another dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int) -> Tensor:
        """All-to-all."""
        ctx.way_back = join, cut
        pieces = comm.all_to_all(torch.stack(x.chunk(comm.size(), cut)))  # one from each rank
        return torch.cat(pieces.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """All-to-all: the gradients take the way back."""
        return Trade.apply(gradient, *ctx.way_back), None, None


class UlyssesAttention(Attention):
    """The model's attention, for this rank's tokens."""

    def mix(self, x: Tensor) -> Tensor:  # (B, T / n, D)
        """As in gpt.py, between two trades."""
        projected = (project(x) for project in (self.query, self.key, self.value))
        q_k_v = [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected]  # (B, H, T / n, D / H)
        q, k, v = Trade.apply(torch.stack(q_k_v), HEADS, TOKENS)  # (B, H / n, T, D / H)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Trade.apply(mixed, TOKENS, HEADS).transpose(1, 2).flatten(2)  # (B, T / n, D)


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train `model` in place on this rank's tokens of each batch, and return the losses."""
    same_weights(model)
    blocks = [layer for layer in model if isinstance(layer, Block)]
    for block in blocks:
        block.attention.__class__ = UlyssesAttention  # the same parameters, another forward pass
    rank, n, optimizer, losses = comm.rank(), comm.size(), make_optimizer(model.parameters()), []
    for batch in batches:
        # Compute: what this rank's tokens contribute to the mean loss, and to the gradients.
        inputs, targets = (tokens.chunk(n, dim=1)[rank] for tokens in batch)  # (B, T / n)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) / n
        loss.backward()
        # Communicate: add up what all tokens contribute.
        for p in model.parameters():
            comm.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.detach())
    for block in blocks:
        block.attention.__class__ = Attention
    return comm.all_reduce(torch.stack(losses)).tolist()
