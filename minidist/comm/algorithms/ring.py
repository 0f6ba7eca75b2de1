"""Ring: each rank talks to its two neighbours only, and all links are busy all the time.

The buffer is cut into n parts. In each of n - 1 steps a rank passes one part to the rank after it and takes
one from the rank before it. If it adds what arrives, each part ends complete on one rank: a reduce-scatter.
If it stores what arrives, each part ends on all ranks: an all-gather. The two in a row are an all-reduce that
sends 2 (n - 1) / n of the tensor, which is nearly independent of n and the least possible. It takes
2 (n - 1) steps, too many for a small tensor.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 3.
Lesson: 08 "Ranks that talk"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from minidist.comm.algorithms.steps import Message, Step, offsets

SEGMENT = 2**16
"""Elements of a segment in a broadcast: few for a large tensor, and enough for a message."""


def ring_all_reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-reduce in place: every rank ends with the reduction of all.

    A rank sends 2 (n - 1) / n S in 2 (n - 1) steps; if n does not divide the elements, 2 S without its own
    part and the next rank's.
    """
    yield from ring_reduce_scatter(rank, ranks, elements)
    yield from ring_all_gather(rank, ranks, elements)


def ring_reduce_scatter(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """Reduce-scatter in place: part `rank` ends complete, the others with partial sums.

    A rank sends (n - 1) / n S in n - 1 steps; if n does not divide the elements, S without its own part.
    """
    yield from reduce_scatter_among(range(ranks), rank, offsets(elements, ranks))


def ring_all_gather(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-gather in place, from a buffer whose part `rank` is filled: every rank ends with all parts.

    A rank sends (n - 1) / n of the buffer in n - 1 steps; if n does not divide the elements, all but the
    next rank's part.
    """
    yield from all_gather_among(range(ranks), rank, offsets(elements, ranks))


def reduce_scatter_among(members: Sequence[int], index: int, bounds: Sequence[int]) -> Iterator[Step]:
    """Reduce-scatter around a ring of `members`: `members[i]` ends with [bounds[i], bounds[i + 1])."""
    # Part i starts at the rank after i, visits all, and ends at rank i.
    yield from _around(members, index, bounds, index - 1, reduce=True)


def all_gather_among(members: Sequence[int], index: int, bounds: Sequence[int]) -> Iterator[Step]:
    """All-gather around a ring of `members`, where `members[i]` has [bounds[i], bounds[i + 1])."""
    yield from _around(members, index, bounds, index, reduce=False)


def _around(
    members: Sequence[int], index: int, bounds: Sequence[int], first: int, reduce: bool
) -> Iterator[Step]:
    n = len(members)
    before, after = members[(index - 1) % n], members[(index + 1) % n]
    for step in range(n - 1):
        gives, takes = (first - step) % n, (first - step - 1) % n
        yield Step(
            sends=(Message(after, bounds[gives], bounds[gives + 1]),),
            receives=(Message(before, bounds[takes], bounds[takes + 1], reduce),),
        )


def ring_broadcast(
    rank: int, ranks: int, elements: int, source: int = 0, segment: int = SEGMENT
) -> Iterator[Step]:
    """Broadcast in place along a chain from `source`, in segments: each is passed on while the next arrives.

    Every rank but the last of the chain sends S, in n - 2 + S / segment steps. Whole tensors would take n - 1
    steps of S each: with segments a long chain is about as fast as one link.
    """
    index = (rank - source) % ranks
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    cuts = [(start, min(start + segment, elements)) for start in range(0, elements, segment)]
    arriving = cuts if index > 0 else []
    leaving = cuts if index < ranks - 1 else []
    if index > 0 and leaving:
        leaving = [(0, 0), *leaving]  # it passes on a segment one step after it came
    for takes, gives in zip_longest(arriving, leaving, fillvalue=(0, 0)):
        yield Step(
            sends=(Message(after, *gives),) if gives[1] else (),
            receives=(Message(before, *takes),) if takes[1] else (),
        )
