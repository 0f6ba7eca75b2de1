"""Work around gloo: a reduce-scatter with half its bytes, other dtypes, and the shape of its broadcast tree.

gloo's own reduce-scatter puts as many bytes on the wire as an all-reduce. Its collectives take some dtypes
alone, also where they only move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist.comm.work import Group

CHUNK = 2**23
"""Bytes of a tensor that a synchronous reduce-scatter handles at once."""


_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def movable(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, or its flat bytes where gloo does not know its dtype."""
    if x.dtype in _DTYPES:
        return x
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def all_to_all(
    received: torch.Tensor, sent: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int], group: Group
) -> Any:
    """As torch's, for flat tensors of any dtype. incoming, outgoing: elements from and to each rank."""
    scale = 1 if sent.dtype in _DTYPES else sent.element_size()
    incoming, outgoing = ([scale * count for count in parts] for parts in (incoming, outgoing))
    return dist.all_to_all_single(movable(received), movable(sent), incoming, outgoing, group, async_op=True)


def scatter_by_chunks(
    parts: torch.Tensor, shard: torch.Tensor, reduce: Callable[..., torch.Tensor], group: Group
) -> None:
    """Reduce-scatter by an all-to-all and a local reduction, a range of columns at a time, to save memory.

    parts: (ranks, length), row r for rank r. shard: (length,), this rank's result.
    """
    ranks, length = parts.shape
    width = max(1, CHUNK // (ranks * parts.element_size()))
    sent, arrived = (parts.new_empty(ranks * min(width, length)) for _ in range(2))
    for low in range(0, length, width):
        part = parts[:, low : low + width]
        outgoing, incoming = (buffer[: part.numel()].view(part.shape) for buffer in (sent, arrived))
        outgoing.copy_(part)
        dist.all_to_all_single(movable(incoming), movable(outgoing), group=group)
        shard[low : low + width].copy_(reduce(incoming, dim=0))


def tree_children(rank: int, ranks: int) -> int:
    """Count the children of a rank in gloo's broadcast tree. rank: counted from the root."""
    # A rank receives over its highest set bit, and then sends over the higher ones.
    return sum(rank + (1 << bit) < ranks for bit in range(rank.bit_length(), (ranks - 1).bit_length()))
