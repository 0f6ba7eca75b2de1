"""Binomial tree: few steps, which suits small tensors.

With ranks numbered from the root, the parent of a rank is that rank without its lowest set bit: 6 = 110 sends
to 4 = 100, and 4 to 0. A rank and all ranks below it are then consecutive, [rank, rank + lowest bit), so that
a subtree's parts are one contiguous range. A reduction takes ceil(log2 n) steps up the tree, a broadcast as
many down. Each message is a whole tensor, and the root sends ceil(log2 n) of them: too much for a large one.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, sections
4.2 (broadcast) and 4.5 (reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minidist.comm.algorithms.steps import Message, Step, offsets

Part = Callable[[int, int], tuple[int, int]]
"""The elements [start, stop) between a rank and its parent, from the rank's index and its lowest set bit."""


def tree_all_reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-reduce in place: reduce to rank 0, then broadcast from it.

    A rank sends S to its parent (rank 0 has none) and S to each child, in 2 ceil(log2 n) steps: 2 (n - 1) S
    over all ranks, as much as a ring, and up to ceil(log2 n) S of it from one rank.
    """
    yield from _up(rank, ranks, _whole(elements), reduce=True)
    yield from _down(rank, ranks, _whole(elements))


def tree_reduce_scatter(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """Reduce-scatter in place: reduce to rank 0, then send each child the parts of its subtree.

    A rank sends S to its parent (rank 0 has none), and to each child its subtree's part of S.
    """
    yield from _up(rank, ranks, _whole(elements), reduce=True)
    yield from _down(rank, ranks, _subtree(ranks, elements))


def tree_all_gather(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-gather in place: gather to rank 0, a subtree's parts at a time, then broadcast from it.

    A rank sends its subtree's parts to its parent (rank 0 has none), and the whole buffer to each child.
    """
    yield from _up(rank, ranks, _subtree(ranks, elements), reduce=False)
    yield from _down(rank, ranks, _whole(elements))


def tree_broadcast(rank: int, ranks: int, elements: int, source: int = 0) -> Iterator[Step]:
    """Broadcast in place from `source`: after each step twice as many ranks have the tensor.

    A rank sends S to each child, in ceil(log2 n) steps: (n - 1) S over all ranks, of which the source sends
    ceil(log2 n) S.
    """
    yield from _down(rank, ranks, _whole(elements), source)


def _up(rank: int, ranks: int, part: Part, reduce: bool) -> Iterator[Step]:
    for bit in _bits(ranks):
        if rank % (2 * bit) == 0 and rank + bit < ranks:
            yield Step(receives=(Message(rank + bit, *part(rank + bit, bit), reduce),))
        elif rank % (2 * bit) == bit:
            yield Step(sends=(Message(rank - bit, *part(rank, bit)),))


def _down(rank: int, ranks: int, part: Part, root: int = 0) -> Iterator[Step]:
    index = (rank - root) % ranks
    for bit in reversed(_bits(ranks)):
        if index % (2 * bit) == 0 and index + bit < ranks:
            yield Step(sends=(Message((rank + bit) % ranks, *part(index + bit, bit)),))
        elif index % (2 * bit) == bit:
            yield Step(receives=(Message((rank - bit) % ranks, *part(index, bit)),))


def _bits(ranks: int) -> list[int]:
    """1, 2, 4, ...: the distances between parents and children."""
    return [1 << i for i in range((ranks - 1).bit_length())]


def _whole(elements: int) -> Part:
    return lambda index, bit: (0, elements)


def _subtree(ranks: int, elements: int) -> Part:
    bounds = offsets(elements, ranks)
    return lambda index, bit: (bounds[index], bounds[min(index + bit, ranks)])
