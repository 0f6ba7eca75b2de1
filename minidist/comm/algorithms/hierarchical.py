"""Hierarchical: first inside a node, where links are fast, then between nodes, where they are slow.

A reduce-scatter inside each node leaves each of its L ranks with 1/L of the tensor, reduced over the node.
The ranks with the same part, one in each node, all-reduce it around a ring: L rings run between the nodes at
once, each with 1/L of the tensor. An all-gather inside the node completes the tensor. Each of the M nodes
sends 2 (M - 1) / M S to others, however many ranks it has; one ring through all n ranks would wait for the
slowest link in 2 (n - 1) rounds.

If nodes differ in size, there are as many parts as the smallest node has ranks; further ranks only help
inside their node.

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

    With M nodes of L ranks each, a rank sends 2 (L - 1) / L S inside the node and 2 (M - 1) / M S / L to
    another, in 2 (L - 1) + 2 (M - 1) steps.

    node: the ranks of a node, of which the last may have fewer; or a list of each node's ranks; None for one
    node. The ranks of a node are numbered consecutively.

    Raises:
        ValueError: the nodes' ranks do not add up to `ranks`.
    """
    sizes = node_sizes(ranks, node)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    mine = max(i for i, start in enumerate(starts) if start <= rank)
    index, size = rank - starts[mine], sizes[mine]
    members = range(starts[mine], starts[mine] + size)
    parts = min(sizes)
    bounds = offsets(elements, parts) + [elements] * (size - parts)

    yield from reduce_scatter_among(members, index, bounds)
    if index < parts:
        start, stop = bounds[index], bounds[index + 1]
        peers = [first + index for first in starts]  # one in each node
        within = [start + offset for offset in offsets(stop - start, len(sizes))]
        yield from reduce_scatter_among(peers, mine, within)
        yield from all_gather_among(peers, mine, within)
    yield from all_gather_among(members, index, bounds)


def node_sizes(ranks: int, node: int | Sequence[int] | None) -> list[int]:
    """How many ranks each node has, from the argument `node` of `hierarchical_all_reduce`."""
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
