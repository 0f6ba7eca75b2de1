"""Ring attention: exact attention over a sequence that is cut across ranks.

Each rank holds the queries, keys and values of its positions. Blocks of keys and values travel around the
ring: a rank computes with its block while the next one arrives, and puts the softmax together block by block.
After n - 1 hops every query has seen all keys, and no rank has ever held more than two blocks. In the
backward pass the blocks travel again. Their gradients follow one hop behind, in float32 or wider, until they
reach the rank that owns the keys; so a sum over n ranks is rounded like a sum over blocks on one rank.

Positions are in zigzag order (zigzag_order.py), which gives each rank the same work under a causal mask. A
rank skips the blocks that the mask hides completely.

Sources: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
section 3; Brandon et al. 2023, "Striped Attention", section 3, for the balance.

B batch, H query heads, K key heads, G = H / K, N = B K, T this rank's positions, D width of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist._arguments import check_whole, is_number
from minidist.comm.opaque import opaque, refuse_recorded
from minidist.comm.work import Group, Work, rank_in, ranks_of
from minidist.kernels.attention_rung import AttentionRung
from minidist.model.attention import check_rung
from minidist.parallel.context_parallel import blockwise_attention as blocks
from minidist.parallel.context_parallel import zigzag_order

TILE = 512
"""Keys that a rank computes with at once: the largest matrix is its queries by TILE keys."""
TOLD = 8
"""How many int64 numbers describe a rank's arguments to the others."""


@opaque
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
    rung: AttentionRung | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks; all ranks of the group call it.

    >>> share = SequenceShare()
    >>> q, k, v = (share.cut(x, dim=2) for x in (q, k, v))   # or computed from a share of the tokens
    >>> mixed = ring_attention(q, k, v, length=share.length)

    Forward: keys and values go n - 1 hops around the ring. Backward: they go again, and their gradients
    follow for n - 1 hops. `ring_bytes` gives the bytes that a rank sends. The backward pass needs q, k, v,
    the result, and one number for each query and head. Each call first compares the ranks' shapes.

    Args:
        q: (B, H, T, D), floating; the queries at this rank's positions, in zigzag order.
        k, v: (B, K, T, D), of q's dtype; K divides H, and query head h attends to key head h K // H.
        causal: a position sees itself and earlier ones; if False, all.
        group: the ranks that share the sequence; None for all.
        length: of the whole sequence; None for the sum of the ranks' positions.
        scale: multiplies the scores; None for 1 / sqrt(D).
        tile: keys to compute with at once.
        rung: of attention, for the blocks; takes float32, which the ring gives it. None for torch's products.

    Returns (B, H, T, D), of q's dtype; sums are kept in float32, or in float64 if q is float64. Raises
    TypeError for a wrong type or dtype, ValueError if shapes do not fit, on this rank or between ranks, or if
    T is not this rank's share of the length.
    """
    check_attention_arguments(q, k, v, tile, length, scale)
    check_ring_rung(rung)
    rank, ranks = rank_in(group), len(ranks_of(group))
    length = agreed_length(q, k, length, causal, group)
    ring = _Ring(group, rank, ranks, length, causal, tile, rung)
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
    """Return the bytes that a rank sends in `ring_attention`'s forward pass, or in its backward pass.

    S_j is the bytes of rank j's keys. Forward: 2 S_j for every rank but its successor, and 64 (n - 1) for the
    shapes. Backward: the same 2 S_j, and 2 S_j for every rank but itself in the dtype of the sums. Over all
    ranks, without the shapes, that is 2 (n - 1) S forward, where S is the bytes of all keys, and twice that
    backward if q has the dtype of the sums. Raises ValueError if `rank` is not one of the ranks.
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


class _Ring(NamedTuple):
    """This rank's position in the ring, and what its queries see of the other ranks' keys."""

    group: Group
    rank: int
    ranks: int
    length: int
    causal: bool
    tile: int
    rung: AttentionRung | None

    def owner(self, step: int) -> int:
        """The rank whose block is here after `step` hops."""
        return (self.rank - step) % self.ranks

    def size(self, owner: int) -> int:
        return zigzag_order.size(self.length, self.ranks, owner)

    def sight(self, owner: int) -> zigzag_order.Sight:
        return zigzag_order.sight(self.length, self.ranks, self.rank, owner, self.causal)

    def pass_on(self, block: Tensor, into: Tensor, tag: int) -> list[Work]:
        """Send a block to the next rank and receive one from the rank before; both are still under way."""
        following, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        works = []
        # Even ranks send first: NCCL runs a pair's messages in order, so two ranks that both send would wait.
        for sends in (self.rank % 2 == 0, self.rank % 2 == 1):
            if sends and block.numel():
                works.append(comm.send(block, following, tag, self.group, async_op=True))
            if not sends and into.numel():
                works.append(comm.recv(into, before, tag, self.group, async_op=True))
        return works

    def go_on(self, block: Tensor, step: int) -> tuple[list[Work], Tensor]:
        """Send the keys and values on and start to receive the next ones; do nothing at the last step."""
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
        softmax = blocks.RungSoftmax(queries, ring.rung) if ring.rung else blocks.OnlineSoftmax(queries)
        for step in range(ring.ranks):
            # Launch: send the block on while computing with it.
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_recorded("ring attention", "use a layout with cp=1")
        q, k, v, result, log_total = ctx.saved_tensors
        ring, scale, heads = ctx.ring, ctx.scale, k.shape[1]
        queries = _grouped(q, heads).mul(scale)
        given = queries, _grouped(result, heads), log_total, _grouped(gradient, heads)
        softmax = blocks.RungGradient(ring.rung, *given) if ring.rung else blocks.SoftmaxGradient(*given)
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
            # Wait; add the gradients that earlier ranks found for this block, and send the sum on. The
            # block's owner keeps its own part until the others' sum arrives, which saves a hop.
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
        queries_gradient = softmax.queries.mul_(scale).view(q.shape).to(q.dtype)
        return queries_gradient, keys_gradient, values_gradient, None, None


def _grouped(x: Tensor, key_heads: int) -> Tensor:  # (B, H, T, D) -> (N, G, T, D)
    """Group the heads by key head, in the dtype of the sums."""
    batch, heads, size, width = x.shape
    return x.to(_wide(x.dtype)).reshape(batch * key_heads, heads // key_heads, size, width)


def _empty(like: Tensor, size: int) -> Tensor:  # (2, N, _, D) -> (2, N, size, D)
    return like.new_empty((*like.shape[:2], size, like.shape[3]))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Checks

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def agreed_length(q: Tensor, k: Tensor, length: int | None, causal: bool, group: Group) -> int:
    """Return the length of the whole sequence, after checking that the ranks' arguments fit together.

    If ranks differed in a shape, gloo would end the process in the middle of a block, or give wrong numbers
    if the block has the expected number of bytes. Every call checks: a rank that checked only shapes new to
    it would wait for ranks that do not check.
    """
    ranks = len(ranks_of(group))
    batch, heads, own, width = q.shape
    number = _DTYPES.index(q.dtype) if q.dtype in _DTYPES else -1
    told = [own, batch, heads, k.shape[1], width, number, -1 if length is None else length, bool(causal)]
    found = comm.all_gather(torch.tensor(told, device="cpu"), group=group).view(ranks, TOLD).tolist()
    for rank, each in enumerate(found):
        if each[1:] != found[0][1:]:
            raise ValueError(
                f"the ranks give attention different arguments: rank 0 {_described(found[0])}, and "
                f"rank {rank} {_described(each)}; only the number of positions, T, may differ"
            )
    sizes = [each[0] for each in found]
    length = sum(sizes) if length is None else length
    wanted = [zigzag_order.size(length, ranks, rank) for rank in range(ranks)]
    if sizes != wanted:
        raise ValueError(
            f"the ranks have {sizes} positions, but zigzag order cuts a sequence of {length} into {wanted}; "
            "cut the sequence with SequenceShare"
        )
    return length


def _described(told: list[int]) -> str:
    size, batch, heads, key_heads, width, number, length, causal = told
    dtype = str(_DTYPES[number]) if number >= 0 else "another dtype"
    return (
        f"has q {(batch, heads, size, width)} and k {(batch, key_heads, size, width)} in {dtype}, length="
        f"{None if length < 0 else length}, causal={bool(causal)}"
    )


def check_ring_rung(rung: AttentionRung | None) -> None:
    """Raise TypeError unless `rung` is None, or a rung of attention that takes float32."""
    if rung is None:
        return
    check_rung("rung", rung)
    if "float32" not in rung.dtypes:
        raise TypeError(
            f"rung {rung.name} takes {' or '.join(rung.dtypes)}, and a ring gives its rung float32: take a "
            "CUDA rung from s1 to s3, or a CPU rung"
        )


def check_attention_arguments(
    q: Tensor, k: Tensor, v: Tensor, tile: int, length: int | None, scale: float | None
) -> None:
    """Raise TypeError or ValueError if this rank's arguments are wrong; see `ring_attention`."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k and v are {kinds}; give torch tensors")
    if length is not None:
        check_whole("length", length, 0, ", the positions of the whole sequence")
    check_whole("tile", tile, 1, ", the keys to compute with at once")
    if scale is not None and not is_number(scale):
        raise TypeError(f"scale is {scale!r}; give a number, or None for 1 / sqrt(D)")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give one floating dtype")
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"{shapes}; give q (B, H, T, D), and k and v (B, K, T, D)")
    if q.shape[3] != k.shape[3] or not q.shape[3]:
        raise ValueError(f"{shapes}; give the heads of all three one width of at least 1")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}; the number of key heads has to divide that of query heads")
