"""What gloo leaves to be desired, or to be known: a lean reduce-scatter, and the shape of its broadcast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from minidist.comm.work import Group

CHUNK = 2**23
"""Bytes of a tensor that a synchronous reduce-scatter handles at once."""


def scatter_by_chunks(
    parts: torch.Tensor, share: torch.Tensor, reduce: Callable[..., torch.Tensor], group: Group
) -> None:
    """Reduce-scatter row by row, a part of all rows at a time: fresh memory for all would cost more."""
    ranks, length = parts.shape
    width = max(1, CHUNK // (ranks * parts.element_size()))
    sent, arrived = (parts.new_empty(ranks * min(width, length)) for _ in range(2))
    for low in range(0, length, width):
        part = parts[:, low : low + width]
        gives, comes = (buffer[: part.numel()].view(part.shape) for buffer in (sent, arrived))
        dist.all_to_all_single(comes, gives.copy_(part), group=group)
        share[low : low + width].copy_(reduce(comes, dim=0))


def tree_children(place: int, ranks: int) -> int:
    """Number of children of a rank in gloo's broadcast tree, `place` counted from the root."""
    # A rank receives over its highest set bit, and then serves the higher ones.
    return sum(place + (1 << bit) < ranks for bit in range(place.bit_length(), (ranks - 1).bit_length()))
