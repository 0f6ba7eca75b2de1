"""Work around gloo: a reduce-scatter with half its bytes, and the shape of its broadcast tree.

gloo's own reduce-scatter puts as many bytes on the wire as an all-reduce.
"""

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
    """Reduce-scatter by an all-to-all and a local reduction, a range of columns at a time, to save memory.

    parts: (ranks, length), row r for rank r. share: (length,), this rank's result.
    """
    ranks, length = parts.shape
    width = max(1, CHUNK // (ranks * parts.element_size()))
    sent, arrived = (parts.new_empty(ranks * min(width, length)) for _ in range(2))
    for low in range(0, length, width):
        part = parts[:, low : low + width]
        outgoing, incoming = (buffer[: part.numel()].view(part.shape) for buffer in (sent, arrived))
        dist.all_to_all_single(incoming, outgoing.copy_(part), group=group)
        share[low : low + width].copy_(reduce(incoming, dim=0))


def tree_children(rank: int, ranks: int) -> int:
    """Count the children of a rank in gloo's broadcast tree. rank: counted from the root."""
    # A rank receives over its highest set bit, and then sends over the higher ones.
    return sum(rank + (1 << bit) < ranks for bit in range(rank.bit_length(), (ranks - 1).bit_length()))
