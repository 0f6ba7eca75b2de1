"""Binomial tree: few steps, and so the choice for small tensors.

Numbered from the root, the parent of a rank is that rank without its lowest set bit: 6 = 110 sends to
4 = 100, and 4 to 0. A rank and all below it are then neighbours, [rank, rank + lowest bit), which makes
gathering and scattering parts a matter of contiguous ranges. A reduction takes ceil(log2 n) steps up the
tree, a broadcast as many down. In each step whole tensors are sent, the root sends ceil(log2 n) of them: too
much for a large tensor.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, sections
4.2 (broadcast) and 4.5 (reduce).
"""

from __future__ import annotations

from collections.abc import Iterator

from minidist.comm.algorithms.steps import Message, Step, offsets


def tree_all_reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-reduce in place: reduce to rank 0, then broadcast from it.

    Sends S to the parent (rank 0 has none) and S to each child: 2 (n - 1) S over all ranks, as much as a
    ring, and up to ceil(log2 n) S of it from one rank. 2 ceil(log2 n) steps.
    """
    yield from _reduce(rank, ranks, elements)
    yield from tree_broadcast(rank, ranks, elements)


def tree_reduce_scatter(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """Reduce-scatter in place: reduce to rank 0, which sends each child the parts of all below it.

    Sends S to the parent (rank 0 has none) and to each child its subtree's part of S.
    """
    yield from _reduce(rank, ranks, elements)
    bounds = offsets(elements, ranks)
    for bit in reversed(_bits(ranks)):
        if rank % (2 * bit) == 0 and rank + bit < ranks:
            yield Step(sends=(Message(rank + bit, *_below(rank + bit, bit, bounds)),))
        elif rank % (2 * bit) == bit:
            yield Step(receives=(Message(rank - bit, *_below(rank, bit, bounds)),))


def tree_all_gather(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-gather in place: gather to rank 0, a subtree's parts at a time, then broadcast from it.

    Sends its subtree's parts to the parent (rank 0 has none), and the whole buffer to each child.
    """
    bounds = offsets(elements, ranks)
    for bit in _bits(ranks):
        if rank % (2 * bit) == 0 and rank + bit < ranks:
            yield Step(receives=(Message(rank + bit, *_below(rank + bit, bit, bounds)),))
        elif rank % (2 * bit) == bit:
            yield Step(sends=(Message(rank - bit, *_below(rank, bit, bounds)),))
    yield from tree_broadcast(rank, ranks, elements)


def tree_broadcast(rank: int, ranks: int, elements: int, source: int = 0) -> Iterator[Step]:
    """Broadcast in place from `source`: in each step twice as many ranks have the tensor.

    Sends S to each child: n - 1 over all ranks together, ceil(log2 n) from the source. ceil(log2 n) steps.
    """
    place = (rank - source) % ranks
    for bit in reversed(_bits(ranks)):
        if place % (2 * bit) == 0 and place + bit < ranks:
            yield Step(sends=(Message((rank + bit) % ranks, 0, elements),))
        elif place % (2 * bit) == bit:
            yield Step(receives=(Message((rank - bit) % ranks, 0, elements),))


def _reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """Reduce to rank 0: the broadcast backwards."""
    for bit in _bits(ranks):
        if rank % (2 * bit) == 0 and rank + bit < ranks:
            yield Step(receives=(Message(rank + bit, 0, elements, reduce=True),))
        elif rank % (2 * bit) == bit:
            yield Step(sends=(Message(rank - bit, 0, elements),))


def _bits(ranks: int) -> list[int]:
    """1, 2, 4, ...: the distances between parents and children."""
    return [1 << i for i in range((ranks - 1).bit_length())]


def _below(rank: int, bit: int, bounds: list[int]) -> tuple[int, int]:
    """The parts of a rank whose lowest set bit is `bit`, and of all below it: [start, stop)."""
    return bounds[rank], bounds[min(rank + bit, len(bounds) - 1)]
