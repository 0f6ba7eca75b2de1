"""Ulysses: trade tokens for heads before attention, and heads for tokens after it.

Each rank holds the queries, keys and values of its positions, for all heads. An all-to-all gives it all
positions of some heads instead; with these it attends as one process does, and a second all-to-all brings the
results back to the ranks of their positions.

    rank 0: early and late tokens, heads 0 1 ──╲  ╱── all tokens, head 0 ── attention ──╲  ╱── as before
                                                ╳                                        ╳
    rank 1: middle tokens,         heads 0 1 ──╱  ╲── all tokens, head 1 ── attention ──╱  ╲── as before

In float32 n ranks send 4 / (3 n) of what a ring of them sends, but there can be no more ranks than key heads.
With more ranks, neighbours trade heads, and keys and values go around a ring of these groups. In zigzag order
the positions of a group are just the positions that one rank of that smaller ring would have.

Sources: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3; Fang and Zhao 2024, "USP: A Unified Sequence
Parallelism Approach for Long Context Generative AI", section 3 (both together).

B batch, H query heads, K key heads, T this rank's positions, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from minidist.comm.differentiable import exchange_rows
from minidist.comm.opaque import opaque
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.context_parallel import zigzag_order
from minidist.parallel.context_parallel.attention_in_a_ring import (
    TILE,
    agreed_length,
    check_attention_arguments,
    ring_attention,
)


@opaque
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    group: Group = None,
    *,
    length: int | None = None,
    scale: float | None = None,
    blocks: tuple[Group, Group] | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks; all ranks of the group call it.

    Forward: this rank's queries, keys, values and results go to other ranks, but for an n-th of each.
    Backward: their gradients. For K = H and n ranks that is 8 (n - 1) / n^2 S bytes, where S is the bytes of
    all positions of the queries. Each call first compares the ranks' shapes. It has second derivatives.

    Args:
        q, k, v, causal, group, length, scale: as for `ring_attention`.
        blocks: neighbours in the group that trade heads, and the ranks with the same place in the other
            blocks, which form a ring (`Mesh.blocks`); None if the whole group trades heads.

    Returns (B, H, T, D), of q's dtype.

    Raises:
        ValueError: more ranks trade heads than there are key heads, or as for `ring_attention`.
    """
    check_attention_arguments(q, k, v, TILE, length, scale)
    neighbours, ring = (group, None) if blocks is None else blocks
    length = agreed_length(q, k, length, causal, group)
    ranks, own = len(ranks_of(neighbours)), rank_in(neighbours)
    if k.shape[1] < ranks:
        raise ValueError(
            f"there are {k.shape[1]} key heads for the {ranks} ranks that trade heads; give "
            f'cp_kind="ring", or let at most {k.shape[1]} trade'
        )
    everyone = len(ranks_of(group))
    first = rank_in(group) - own  # of the neighbours, in the group
    positions = [zigzag_order.positions(length, everyone, first + r).to(q.device) for r in range(ranks)]
    keys = [k.shape[1] * r // ranks for r in range(ranks + 1)]  # rank r gets key heads keys[r] to keys[r + 1]
    group_size = q.shape[1] // k.shape[1]
    sizes, heads = [*map(len, positions)], [b - a for a, b in pairwise(keys)]
    mine, ours = [heads[own]] * ranks, [sizes[own]] * ranks
    # Launch: to each rank its heads, a key head and its value head behind their queries.
    together = torch.cat((q.unflatten(1, (-1, group_size)), k[:, :, None], v[:, :, None]), 2)  # type: ignore[no-untyped-call]
    whole = _trade(torch.split(together, heads, 1), mine, sizes, 3, neighbours)
    order = torch.cat(positions).argsort()
    whole = whole.index_select(3, order)  # (B, mine, G + 2, positions, D)
    # Compute.
    queries, key, value = whole[:, :, :group_size].flatten(1, 2), whole[:, :, -2], whole[:, :, -1]
    if blocks is not None and len(ranks_of(ring)) > 1:
        mixed = ring_attention(queries, key, value, causal, ring, length=length, scale=scale)
    else:
        mixed = functional.scaled_dot_product_attention(
            queries, key, value, is_causal=causal, scale=scale, enable_gqa=group_size > 1
        )
    # Back: to each rank its positions.
    mixed = mixed.view(*whole.shape[:2], group_size, *whole.shape[3:]).index_select(3, order.argsort())
    return _trade(torch.split(mixed, sizes, 3), heads, ours, 1, neighbours).flatten(1, 2)


def _trade(
    parts: Sequence[Tensor], heads: list[int], positions: list[int], dim: int, group: Group
) -> Tensor:  # (B, heads, _, positions, D)
    """Send parts[r] to rank r, get heads[r] heads at positions[r] positions, and join along `dim`."""
    batch, _, depth, _, width = parts[0].shape
    shapes = [(batch, h, depth, t, width) for h, t in zip(heads, positions, strict=True)]
    flat = torch.cat([part.reshape(-1) for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    arrived = torch.split(exchange_rows(flat, [part.numel() for part in parts], sizes, group), sizes)
    return torch.cat([each.view(shape) for each, shape in zip(arrived, shapes, strict=True)], dim)
