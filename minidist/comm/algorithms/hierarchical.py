"""Hierarchical: first inside a node, where links are fast, then between nodes, where they are slow.

A reduce-scatter inside each node leaves each of its L ranks with 1/L of the tensor, reduced over the node.
The ranks with the same part, one in each node, all-reduce it around a ring: L rings between the nodes at
once, each with 1/L of the tensor. An all-gather inside the node completes it. Each of the M nodes so sends
2 (M - 1) / M S to others, however many ranks it has, where one ring through all n ranks has
2 (n - 1) rounds to wait for the slowest link.

Where nodes differ in size, there are as many parts as the smallest node has ranks; the ranks beyond these
only help inside their node.

Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018; Horovod's
hierarchical all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minidist.comm.algorithms.ring import all_gather_among, reduce_scatter_among
from minidist.comm.algorithms.steps import Step, offsets


def hierarchical_all_reduce(
    rank: int, ranks: int, elements: int, node: int | Sequence[int] | None = None
) -> Iterator[Step]:
    """All-reduce in place.

    With M nodes of L ranks each, sends 2 (L - 1) / L S inside the node and 2 (M - 1) / M S / L to another,
    in 2 (L - 1) + 2 (M - 1) steps.

    Args:
        rank: this rank.
        ranks: how many there are; those of a node follow each other.
        elements: of the tensor.
        node: ranks of a node, of which the last may have fewer; or the number of each node's ranks; None
            where all are on one node.

    Raises:
        ValueError: the nodes' ranks do not add up to `ranks`.
    """
    sizes = node_sizes(ranks, node)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    mine = max(i for i, start in enumerate(starts) if start <= rank)
    place, size = rank - starts[mine], sizes[mine]
    members = range(starts[mine], starts[mine] + size)
    parts = min(sizes)
    bounds = offsets(elements, parts) + [elements] * (size - parts)

    yield from reduce_scatter_among(members, place, bounds)
    if place < parts:
        start, stop = bounds[place], bounds[place + 1]
        peers = [first + place for first in starts]  # one in each node
        within = [start + offset for offset in offsets(stop - start, len(sizes))]
        yield from reduce_scatter_among(peers, mine, within)
        yield from all_gather_among(peers, mine, within)
    yield from all_gather_among(members, place, bounds)


def node_sizes(ranks: int, node: int | Sequence[int] | None) -> list[int]:
    """How many ranks each node has, from what `hierarchical_all_reduce` takes as `node`."""
    if node is None:
        return [ranks]
    if isinstance(node, int):
        if node < 1:
            raise ValueError(f"node is {node}; give the number of ranks on a node, from 1 to {ranks}")
        return [min(node, ranks - first) for first in range(0, ranks, node)]
    sizes = list(node)
    if sum(sizes) != ranks or min(sizes, default=0) < 1:
        raise ValueError(
            f"node is {sizes}; the ranks of the nodes, 1 or more each, have to add up to {ranks}"
        )
    return sizes
