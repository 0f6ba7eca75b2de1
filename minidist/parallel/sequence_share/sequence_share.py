"""A rank's share of a sequence, and a model that works on it: context parallelism for a whole GPT.

Most of a transformer treats each position by itself. Two parts do not: the positions must be those in the
whole sequence, and attention must see the keys of the other ranks, which is `ring_attention`. Parameters are
whole on each rank; their gradients are summed, since each rank has only some of the positions.

Source: NVIDIA, Megatron-LM's context parallelism; attention and order of positions: context_parallel/.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.opaque import opaque, refuse_recorded
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.context_parallel import zigzag_order
from minidist.parallel.context_parallel.attention_in_a_ring import check_ring_rung, ring_attention
from minidist.parallel.context_parallel.ulysses import ulysses_attention

Module = TypeVar("Module", bound=nn.Module)


class SequenceShare:
    """Cuts sequences into the ranks' shares, in zigzag order, and puts them together.

    >>> share = SequenceShare()
    >>> model = apply(GPT(config), share)
    >>> outputs, targets = model(share.cut(tokens)), share.cut(targets)
    >>> loss = cross_entropy(outputs, targets) * share.part    # gradients: summed over the ranks

    If there are fewer than two positions a rank, a rank may have none. Its loss is then 0, and it has to run
    forward and backward like the others.

    blocks: for attention that trades heads, as for `ulysses_attention`; None for ring attention.
    """

    def __init__(self, group: Group = None, blocks: tuple[Group, Group] | None = None) -> None:
        self.group, self.rank, self.ranks = group, rank_in(group), len(ranks_of(group))
        self.blocks = blocks
        self.length: int | None = None  # of the whole sequence of the last cut
        self.positions = torch.empty(0, dtype=torch.int64)  # of the last cut, (T,), ascending, on its device

    @property
    def size(self) -> int:
        """How many positions this rank has in the last cut."""
        return len(self.positions)

    @property
    def part(self) -> float:
        """This rank's fraction of all positions; 0 if there are none."""
        return self.size / self.length if self.length else 0.0

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a whole sequence: (..., length, ...) -> (..., T, ...). Sends nothing."""
        length = x.shape[dim]
        if length != self.length or self.positions.device != x.device:
            self.length = length
            self.positions = zigzag_order.positions(length, self.ranks, self.rank).to(x.device)
        return x.index_select(dim, self.positions)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None, rung: Any = None
    ) -> Tensor:
        """Attend from the queries of this rank's positions to all ranks' keys; a ring may take a rung."""
        given = q, k, v, causal, self.group
        if self.blocks is None:
            return ring_attention(*given, length=self.length, scale=scale, rung=rung)
        return ulysses_attention(*given, length=self.length, scale=scale, blocks=self.blocks)

    @opaque
    def positions_of(self, tokens: Tensor) -> Tensor:
        """Return `positions`, after checking that `tokens` (B, T, ...) are from the last cut."""
        if self.length is None or tokens.shape[1] != self.size:
            raise ValueError(
                f"tokens are {tuple(tokens.shape)}, but this rank's part of the last cut has {self.size} "
                "positions; give the model share.cut(tokens)"
            )
        return self.positions

    def restore(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Undo `cut`: join all ranks' parts, given in rank order, to the whole sequence. Sends nothing."""
        sizes = [part.shape[dim] for part in parts]
        length = sum(sizes)
        wanted = [zigzag_order.size(length, self.ranks, rank) for rank in range(self.ranks)]
        if sizes != wanted:
            raise ValueError(
                f"the parts have {sizes} positions, but a sequence of {length} is cut into {wanted}; give "
                "the parts of all ranks, in rank order"
            )
        return zigzag_order.join(parts, dim)

    @opaque
    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence on every rank, from each rank's part of the last cut; all ranks call it.

        Forward: an all-gather of parts padded to the longest; sends (n - 1) times its bytes. Backward: each
        rank takes its own part of the gradient and sends nothing. So every rank must compute the same from
        the whole sequence, and gradients of parameters are still summed over the ranks. Raises ValueError if
        `x` is not as long as this rank's part of the last cut.
        """
        if x.shape[dim] != self.size or self.length is None:
            raise ValueError(
                f"x has {x.shape[dim]} positions, but this rank's part of the last cut has {self.size}; give "
                "a tensor computed from that part"
            )
        whole: Tensor = _GatherShares.apply(x, dim, self)  # type: ignore[no-untyped-call]
        return whole


class _GatherShares(torch.autograd.Function):
    """Forward: all-gather. Backward: the own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, share: SequenceShare) -> Tensor:
        ctx.dim, ctx.positions = dim, share.positions
        assert share.length is not None
        sizes = [zigzag_order.size(share.length, share.ranks, rank) for rank in range(share.ranks)]
        first = x.movedim(dim, 0)
        padded = first.new_zeros((max(sizes), *first.shape[1:]))
        padded[: len(first)] = first
        gathered = comm.all_gather(padded, group=share.group)
        parts = [gathered[rank * max(sizes) :][:size] for rank, size in enumerate(sizes)]
        return share.restore(parts, dim=0).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_recorded("a gathered sequence", "use a layout with cp=1")
        return gradient.index_select(ctx.dim, ctx.positions), None, None


def apply(model: Module, share: SequenceShare, causal: bool = True) -> Module:
    """Make `model` work on this rank's share of the sequence that `share` cut last, and return it.

    Modules with an attribute `attend`, such as GPT's attention, then use `ring_attention`, also with a part
    of the heads; `causal` says whether they are causal. Modules with an attribute `positions`, such as GPT's
    embedding, use the positions of the share; a model that adds positions in another way has to read
    `share.positions` itself. Call this while all layers are present, before a pipeline takes some away. The
    parameters do not change. transformers_models.py does the same for models of transformers. Raises
    ValueError if no module has an attribute `attend`, or a module drops attention weights; TypeError for a
    rung without float32.
    """
    parts = [part for part in model.modules() if callable(getattr(part, "attend", None))]
    if not parts:
        raise ValueError(
            f"a {type(model).__name__} has no attention whose sequence could be cut: cp is for models with "
            "modules that have an attribute `attend`, such as GPT, and models of transformers; use dp instead"
        )
    for part in parts:
        dropout = getattr(part, "dropout", 0.0)
        dropout = getattr(dropout, "p", dropout)  # from an nn.Dropout
        if isinstance(dropout, float) and dropout > 0:
            raise ValueError(
                f"dropout is {dropout} in the model's attention, which cannot drop weights where ranks share "
                "tokens; set it to 0, or leave cp out"
            )
        rung: Any = getattr(part.attend, "rung", None)
        if share.blocks is not None and rung is not None:
            raise ValueError(
                f"the model attends on rung {rung.name}, but these ranks trade heads, and a rung "
                'takes the blocks of a ring; set cp_kind="ring", or leave the rung out'
            )
        check_ring_rung(rung)
    for part in parts:
        rung = getattr(part.attend, "rung", None)
        part.attend = partial(_attend, share, causal, rung)  # type: ignore[assignment]
    for part in model.modules():
        if hasattr(part, "positions"):
            part.positions = partial(_positions, share, part)  # type: ignore[assignment]
    return model


def key_heads(model: nn.Module) -> int | None:
    """The fewest key heads of an attention in a model that is not cut yet; None if nothing tells."""
    found = []
    for part in model.modules():
        config, size, key = (getattr(part, name, None) for name in ("config", "head_size", "key"))
        if hasattr(part, "attend") and isinstance(size, int) and isinstance(key, nn.Linear):
            found.append(key.out_features // size)
        names = ("num_attention_heads", "num_key_value_heads")  # the second where they differ
        found += [count for name in names if isinstance(count := getattr(config, name, None), int)]
    return min(found, default=None)


def _attend(
    share: SequenceShare, causal: bool, rung: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float
) -> Tensor:
    if dropout > 0:
        raise ValueError(f"dropout is {dropout} in attention, which cannot drop weights with cp; set it to 0")
    return share.attend(query, key, value, causal, rung=rung)


@opaque
def _positions(share: SequenceShare, embedding: nn.Module, tokens: Tensor) -> Tensor:
    """Return the positions of `tokens`, after checking that the embedding has so many."""
    positions = share.positions_of(tokens)
    context = getattr(getattr(embedding, "position", None), "num_embeddings", None)
    if context is not None and share.length is not None and share.length > context:
        raise ValueError(f"the sequence has {share.length} tokens; give at most {context}, the context")
    return positions
