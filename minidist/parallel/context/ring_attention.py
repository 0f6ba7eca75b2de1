"""Ring attention: exact attention over a sequence that is cut across ranks.

Each rank holds the queries, keys and values of its positions. Keys and values travel round the ring, a
neighbour's block arrives while the queries compute with the one that is here, and the softmax is put together
block by block: after n - 1 hops every query has seen all keys, and no rank ever held more than two blocks of
them. In the backward pass they travel again, and their gradients behind them, in float32 at least, until
those arrive where the keys live: a sum over n ranks is rounded as one over blocks on one rank is.

Positions are dealt in the zigzag order (zigzag_order.py): causal masks then leave each rank as much to
compute. A rank computes no block that the mask leaves out.

Sources: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
section 3; Brandon et al. 2023, "Striped Attention", section 3, for the balance.

B batch, H query heads, K key heads, G = H / K, N = B K, T this rank's positions, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minidist import comm
from minidist.comm.work import Group, Work, rank_in, ranks_of
from minidist.parallel.context import zigzag_order
from minidist.parallel.context.arguments import TOLD, agreed_length, check_arguments
from minidist.parallel.context.blockwise_attention import OnlineSoftmax, SoftmaxGradient

TILE = 512
"""Keys that are computed with at once: the largest matrix is a rank's queries by these."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    group: Group = None,
    *,
    length: int | None = None,
    scale: float | None = None,
    tile: int = TILE,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; all ranks of the group call it.

    >>> share = SequenceShare()
    >>> q, k, v = (share.cut(x, dim=2) for x in (q, k, v))   # or computed from a share of the tokens
    >>> mixed = ring_attention(q, k, v, length=share.length)

    Forward: keys and values go n - 1 hops round the ring. Backward: they go again, with their gradients n - 1
    hops behind. What a rank sends is `ring_bytes`. Kept for the backward pass are q, k, v, the result, and a
    number for each query and head. First the ranks tell each other their shapes, which block by block would
    be found too late, or not at all.

    Args:
        q: (B, H, T, D), floating; the queries at this rank's positions, in zigzag order.
        k, v: (B, K, T, D), of q's dtype; K divides H, and query head h attends to key head h K // H.
        causal: a position sees itself and those before it; else all.
        group: the ranks that share the sequence; None for all.
        length: of the whole sequence; None for the sum of the ranks' positions.
        scale: of the scores; None for 1 / sqrt(D).
        tile: keys that are computed with at once.

    Returns:
        (B, H, T, D), of q's dtype. Sums are kept in float32, or float64 where q is.

    Raises:
        TypeError: q, k and v are not floating tensors of one dtype, or another argument is of a wrong type.
        ValueError: shapes do not fit, on this rank or to those of another, or T is not its share of the
            length.
        CollectiveError: a peer is gone or late.
    """
    check_arguments(q, k, v, tile, length, scale)
    rank, ranks = rank_in(group), len(ranks_of(group))
    length = agreed_length(q, k, length, causal, group)
    ring = _Ring(group, rank, ranks, length, causal, tile)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    mixed: Tensor = _RingAttention.apply(q, k, v, ring, factor)  # type: ignore[no-untyped-call]
    return mixed


def ring_bytes(
    length: int,
    ranks: int,
    rank: int,
    *,
    batch: int,
    key_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
) -> int:
    """Bytes that a rank sends in `ring_attention`'s forward pass, or in its backward pass.

    With S_j bytes of the keys of rank j, forward: 2 S_j of every rank but its successor, and 64 (n - 1) for
    the shapes. Backward: 2 S_j of these, and of every rank but itself in the dtype of the sums. But for the
    shapes that is, over all ranks, 2 (n - 1) S for all keys' bytes S; backward twice that where the dtype is
    that of the sums.

    Raises:
        ValueError: no ranks, or a rank that is none of them.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}; give at least 1 rank, and one from 0 to ranks - 1")
    sizes = [
        2 * batch * key_heads * head_size * zigzag_order.size(length, ranks, owner) for owner in range(ranks)
    ]
    keys = (sum(sizes) - sizes[(rank + 1) % ranks]) * dtype.itemsize
    if backward:
        return keys + (sum(sizes) - sizes[rank]) * _wide(dtype).itemsize
    return keys + 8 * TOLD * (ranks - 1)


@dataclass(frozen=True)
class _Ring:
    """This rank's place, and what it sees of the others."""

    group: Group
    rank: int
    ranks: int
    length: int
    causal: bool
    tile: int

    def owner(self, step: int) -> int:
        """Whose block is here after so many hops."""
        return (self.rank - step) % self.ranks

    def size(self, owner: int) -> int:
        return zigzag_order.size(self.length, self.ranks, owner)

    def sight(self, owner: int) -> zigzag_order.Sight:
        return zigzag_order.sight(self.length, self.ranks, self.rank, owner, self.causal)

    def pass_on(self, block: Tensor, into: Tensor, tag: int) -> list[Work]:
        """Send a block to the next rank and receive one of the rank before, both still under way."""
        following, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        works = []
        # In turns: NCCL runs the messages of a pair in their order, and two that both send first would wait.
        for sends in (self.rank % 2 == 0, self.rank % 2 == 1):
            if sends and block.numel():
                works.append(comm.send(block, following, tag, self.group, async_op=True))
            if not sends and into.numel():
                works.append(comm.recv(into, before, tag, self.group, async_op=True))
        return works

    def go_on(self, block: Tensor, step: int) -> tuple[list[Work], Tensor]:
        """Send keys and values on, and receive the next ones, still under way; nothing at the last step."""
        if step + 1 == self.ranks:
            return [], block
        coming = _empty(block, self.size(self.owner(step + 1)))
        return self.pass_on(block, coming, tag=0), coming


class _RingAttention(torch.autograd.Function):
    """Forward: keys and values round the ring. Backward: they and their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, scale: float) -> Tensor:
        queries = _grouped(q, k.shape[1]).mul(scale)
        block = torch.stack((k.flatten(0, 1), v.flatten(0, 1)))  # (2, N, T, D)
        softmax = OnlineSoftmax(queries)
        for step in range(ring.ranks):
            # Launch: the block goes on while it is computed with.
            works, coming = ring.go_on(block, step)
            # Compute.
            first, keys, diagonal = ring.sight(ring.owner(step))
            here = block[:, :, :keys].to(queries.dtype)
            softmax.add(queries, here[0], here[1], first, diagonal, ring.tile)
            # Wait.
            for work in works:
                work.wait()
            block = coming
        mixed, log_total = softmax.finish()
        result = mixed.view(q.shape).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, log_total)
        ctx.ring, ctx.scale = ring, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, log_total = ctx.saved_tensors
        ring, scale, heads = ctx.ring, ctx.scale, k.shape[1]
        queries = _grouped(q, heads).mul(scale)
        softmax = SoftmaxGradient(queries, _grouped(result, heads), log_total, _grouped(gradient, heads))
        block = torch.stack((k.flatten(0, 1), v.flatten(0, 1)))  # (2, N, T, D)
        own = sums = torch.empty(0)
        arriving: list[Work] = []  # the sums of gradients that travel one step behind
        for step in range(ring.ranks):
            # Launch.
            works, coming = ring.go_on(block, step)
            # Compute.
            first, keys, diagonal = ring.sight(ring.owner(step))
            here = block[:, :, :keys].to(queries.dtype)
            found = torch.zeros_like(block, dtype=queries.dtype)
            softmax.add(here[0], here[1], found[:, :, :keys], first, diagonal, ring.tile)
            # Wait; add what the ranks before found for this block, and send the sum on. A block's own rank
            # keeps what it finds until the others' comes home: a hop less.
            for work in (*works, *arriving):
                work.wait()
            if step == 0:
                own = found
            else:
                total = found if step == 1 else sums.add_(found)
                sums = _empty(total, ring.size(ring.owner(step + 1)))
                arriving = ring.pass_on(total, sums, tag=1)
            block = coming
        for work in arriving:
            work.wait()
        if ring.ranks > 1:
            own += sums
        keys_gradient, values_gradient = (x.view(k.shape).to(k.dtype) for x in own)
        return (
            softmax.queries.mul_(scale).view(q.shape).to(q.dtype),
            keys_gradient,
            values_gradient,
            None,
            None,
        )


def _grouped(x: Tensor, key_heads: int) -> Tensor:  # (B, H, T, D) -> (N, G, T, D)
    """By key head, in the dtype of the sums."""
    batch, heads, size, width = x.shape
    return x.to(_wide(x.dtype)).reshape(batch * key_heads, heads // key_heads, size, width)


def _empty(like: Tensor, size: int) -> Tensor:  # (2, N, _, D) -> (2, N, size, D)
    return like.new_empty((*like.shape[:2], size, like.shape[3]))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
