"""The zigzag order: which positions of a sequence a rank holds, and which keys its queries see.

The sequence is cut into 2 n chunks for n ranks, and rank r holds chunks r and 2 n - 1 - r: one early, one
late. Under a causal mask a rank's late queries see as many keys more as its early ones see fewer, so every
rank computes 2 n + 1 of the n (2 n + 1) pairs of chunks. In plain order the last rank would compute 2 n times
as much as the first. Chunks differ by at most one position, and may be empty.

Sources: Brandon et al. 2023, "Striped Attention: Faster Ring Attention for Causal Transformers", section 3,
for the imbalance and balance by position; two chunks a rank: Llama Team 2024, "The Llama 3 Herd of Models",
section 3.3.2 (context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the estimate of memory asks for sizes, and runs without torch
    from torch import Tensor


def chunk(length: int, ranks: int, index: int) -> range:
    """Return the positions of a chunk; chunks count from 0 to 2 ranks - 1."""
    return range(index * length // (2 * ranks), (index + 1) * length // (2 * ranks))


def early_and_late(length: int, ranks: int, rank: int) -> tuple[range, range]:
    """Return the positions of a rank: an early chunk and a late one, held in this order."""
    return chunk(length, ranks, rank), chunk(length, ranks, 2 * ranks - 1 - rank)


def size(length: int, ranks: int, rank: int) -> int:
    """Return how many positions a rank has."""
    return sum(map(len, early_and_late(length, ranks, rank)))


def positions(length: int, ranks: int, rank: int) -> Tensor:
    """Return the positions of a rank, (size,), ascending int64."""
    import torch

    early, late = early_and_late(length, ranks, rank)
    return torch.tensor([*early, *late], dtype=torch.int64)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the whole sequence from the parts of all ranks, given in rank order."""
    import torch

    length, ranks = sum(part.shape[dim] for part in parts), len(parts)
    order = torch.cat([positions(length, ranks, rank) for rank in range(ranks)])
    return torch.cat([*parts], dim).index_select(dim, order.argsort().to(parts[0].device))


class Sight(NamedTuple):
    """The part of another rank's keys that one rank's queries see: a rectangle, or the lower triangle."""

    first_query: int  # the rank's queries before this one see nothing
    keys: int  # how many of the owner's keys are seen, from the first on
    diagonal: bool  # query i sees keys 0 to i only


def sight(length: int, ranks: int, rank: int, owner: int, causal: bool) -> Sight:
    """Return what the queries of `rank` see of the keys of `owner`."""
    early, _ = early_and_late(length, ranks, owner)
    if not causal:
        return Sight(0, size(length, ranks, owner), False)
    if owner == rank:
        return Sight(0, size(length, ranks, owner), True)
    if owner < rank:  # its early chunk comes before both of ours, its late one after both
        return Sight(0, len(early), False)
    # Its chunks lie between ours: the late queries see both.
    return Sight(len(early_and_late(length, ranks, rank)[0]), size(length, ranks, owner), False)
