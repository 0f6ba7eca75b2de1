"""Every algorithm by operation and name, and the schedule of all its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from minidist._names import unknown
from minidist.comm.algorithms.halving_doubling import halving_doubling_all_reduce
from minidist.comm.algorithms.hierarchical import hierarchical_all_reduce
from minidist.comm.algorithms.naive import naive_all_reduce
from minidist.comm.algorithms.pairwise import pairwise_all_to_all
from minidist.comm.algorithms.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from minidist.comm.algorithms.steps import Step
from minidist.comm.algorithms.tree import (
    tree_all_gather,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce_scatter,
)

ALGORITHMS: dict[str, dict[str, Callable[..., Iterator[Step]]]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "tree": tree_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
        "hierarchical": hierarchical_all_reduce,
        "naive": naive_all_reduce,
    },
    "reduce_scatter": {"ring": ring_reduce_scatter, "tree": tree_reduce_scatter},
    "all_gather": {"ring": ring_all_gather, "tree": tree_all_gather},
    "broadcast": {"ring": ring_broadcast, "tree": tree_broadcast},
    "all_to_all": {"pairwise": pairwise_all_to_all},
}
"""Operation -> name -> generator(rank, ranks, elements, **options) of one rank's steps.

`elements` is the size of the buffer that the messages name: the tensor of all_reduce and broadcast, the (n k)
input of reduce_scatter, the (n k) output of all_gather, the input of all_to_all.
"""


@dataclass(frozen=True)
class CollectiveSchedule:
    """The steps of all ranks, and the operation that they carry out."""

    operation: str  # "all_reduce"
    elements: int  # of the buffer, as `ALGORITHMS` says
    steps: tuple[tuple[Step, ...], ...]  # those of rank 0, of rank 1, ...
    algorithm: str = "custom"
    source: int = 0  # of a broadcast
    counts: tuple[tuple[int, ...], ...] | None = None  # of an all-to-all: counts[i][j] go from rank i to j

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.steps)


def schedule(
    operation: str,
    algorithm: str,
    ranks: int,
    elements: int,
    counts: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> CollectiveSchedule:
    """The steps of all ranks, to check, draw or count without a process.

    Args:
        operation, algorithm: of `ALGORITHMS`.
        ranks: number of ranks.
        elements: of the buffer, as `ALGORITHMS` says.
        counts: for an all-to-all with uneven parts, counts[i][j] elements go from rank i to rank j.
        options: of the generator: `node`, `source`, `segment`.

    Raises:
        ValueError: an unknown operation or algorithm.
    """
    if operation not in ALGORITHMS:
        raise unknown("operation", operation, ALGORITHMS)
    if algorithm not in ALGORITHMS[operation]:
        raise unknown("algorithm", algorithm, ALGORITHMS[operation])
    generator = ALGORITHMS[operation][algorithm]
    table = None if counts is None else tuple(tuple(row) for row in counts)
    steps = []
    for rank in range(ranks):
        if table is not None:
            options["input_offsets"] = [0, *accumulate(table[rank])]
            options["output_offsets"] = [0, *accumulate(row[rank] for row in table)]
        steps.append(tuple(generator(rank, ranks, elements, **options)))
    return CollectiveSchedule(operation, elements, tuple(steps), algorithm, options.get("source", 0), table)
