"""Binomial tree: few steps, which suits small tensors.

With ranks numbered from the root, the parent of a rank is that rank without its lowest set bit: 6 = 110 sends
to 4 = 100, and 4 to 0. A rank and all ranks below it are then consecutive, [rank, rank + lowest bit), so that
a subtree's parts are one contiguous range. A reduction takes ceil(log2 n) steps up the tree, a broadcast as
many down. Each message is a whole tensor, and the root sends ceil(log2 n) of them: too much for a large one.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, sections
4.2 (broadcast) and 4.5 (reduce).
"""

from __future__ import annotations

from collections.abc import Iterator

from minidist.comm.algorithms.steps import Message, Step, offsets


def tree_all_reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-reduce in place: reduce to rank 0, then broadcast from it.

    A rank sends S to its parent (rank 0 has none) and S to each child, in 2 ceil(log2 n) steps: 2 (n - 1) S
    over all ranks, as much as a ring, and up to ceil(log2 n) S of it from one rank.
    """
    yield from _reduce(rank, ranks, elements)
    yield from tree_broadcast(rank, ranks, elements)


def tree_reduce_scatter(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """Reduce-scatter in place: reduce to rank 0, then send each child the parts of its subtree.

    A rank sends S to its parent (rank 0 has none), and to each child its subtree's part of S.
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

    A rank sends its subtree's parts to its parent (rank 0 has none), and the whole buffer to each child.
    """
    bounds = offsets(elements, ranks)
    for bit in _bits(ranks):
        if rank % (2 * bit) == 0 and rank + bit < ranks:
            yield Step(receives=(Message(rank + bit, *_below(rank + bit, bit, bounds)),))
        elif rank % (2 * bit) == bit:
            yield Step(sends=(Message(rank - bit, *_below(rank, bit, bounds)),))
    yield from tree_broadcast(rank, ranks, elements)


def tree_broadcast(rank: int, ranks: int, elements: int, source: int = 0) -> Iterator[Step]:
    """Broadcast in place from `source`: after each step twice as many ranks have the tensor.

    A rank sends S to each child, in ceil(log2 n) steps: (n - 1) S over all ranks, of which the source sends
    ceil(log2 n) S.
    """
    index = (rank - source) % ranks
    for bit in reversed(_bits(ranks)):
        if index % (2 * bit) == 0 and index + bit < ranks:
            yield Step(sends=(Message((rank + bit) % ranks, 0, elements),))
        elif index % (2 * bit) == bit:
            yield Step(receives=(Message((rank - bit) % ranks, 0, elements),))


def _reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """Reduce to rank 0: a broadcast backwards."""
    for bit in _bits(ranks):
        if rank % (2 * bit) == 0 and rank + bit < ranks:
            yield Step(receives=(Message(rank + bit, 0, elements, reduce=True),))
        elif rank % (2 * bit) == bit:
            yield Step(sends=(Message(rank - bit, 0, elements),))


def _bits(ranks: int) -> list[int]:
    """1, 2, 4, ...: the distances between parents and children."""
    return [1 << i for i in range((ranks - 1).bit_length())]


def _below(rank: int, bit: int, bounds: list[int]) -> tuple[int, int]:
    """The parts of the subtree of a rank whose lowest set bit is `bit`: [start, stop)."""
    return bounds[rank], bounds[min(rank + bit, len(bounds) - 1)]
