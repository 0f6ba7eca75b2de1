"""Ring: each rank talks to two neighbours only, and all links are busy all the time.

The buffer is cut into n parts. In each of n - 1 steps a rank passes one part on to the rank after it and
takes one from the rank before it. Where it adds what arrives to its own, each part ends complete on one rank:
a reduce-scatter. Where it stores what arrives, each part ends on all: an all-gather. One after the other they
are an all-reduce that sends 2 (n - 1) / n of the tensor, nearly independent of n and the least possible.
It takes 2 (n - 1) steps, which is too many for a small tensor.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from minidist.comm.algorithms.steps import Message, Step, offsets

SEGMENT = 2**16
"""Elements of a segment in a broadcast's chain: few beside a large tensor, worth a message of their own."""


def ring_all_reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-reduce in place: every rank ends with the reduction of all.

    Sends 2 (n - 1) / n S, in 2 (n - 1) steps; where n does not divide the elements, 2 S without this rank's
    part and the next rank's.
    """
    yield from ring_reduce_scatter(rank, ranks, elements)
    yield from ring_all_gather(rank, ranks, elements)


def ring_reduce_scatter(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """Reduce-scatter in place: part `rank` ends complete, the others with what passed through.

    Sends (n - 1) / n S, in n - 1 steps; where n does not divide the elements, S without this rank's part.
    """
    yield from reduce_scatter_among(range(ranks), rank, offsets(elements, ranks))


def ring_all_gather(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-gather in place, from a buffer whose part `rank` is filled: every rank ends with all parts.

    Sends (n - 1) / n of the buffer, in n - 1 steps; where n does not divide the elements, all but the next
    rank's part.
    """
    yield from all_gather_among(range(ranks), rank, offsets(elements, ranks))


def reduce_scatter_among(members: Sequence[int], place: int, bounds: Sequence[int]) -> Iterator[Step]:
    """Reduce-scatter around a ring of some ranks: `members[i]` ends with [bounds[i], bounds[i + 1])."""
    # Part i starts at the rank after i and ends, having been everywhere, at rank i.
    yield from _around(members, place, bounds, place - 1, reduce=True)


def all_gather_among(members: Sequence[int], place: int, bounds: Sequence[int]) -> Iterator[Step]:
    """All-gather around a ring of some ranks, where `members[i]` has [bounds[i], bounds[i + 1])."""
    yield from _around(members, place, bounds, place, reduce=False)


def _around(
    members: Sequence[int], place: int, bounds: Sequence[int], first: int, reduce: bool
) -> Iterator[Step]:
    n = len(members)
    before, after = members[(place - 1) % n], members[(place + 1) % n]
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

    Sends S from every rank but the last of the chain, in n - 2 + S / segment steps. Whole tensors would take
    n - 1 steps of S each: segments make a chain as fast as one link.
    """
    place = (rank - source) % ranks
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    cuts = [(start, min(start + segment, elements)) for start in range(0, elements, segment)]
    arriving = cuts if place > 0 else []
    leaving = cuts if place < ranks - 1 else []
    if place > 0 and leaving:
        leaving = [(0, 0), *leaving]  # it passes on a segment one step after it came
    for takes, gives in zip_longest(arriving, leaving, fillvalue=(0, 0)):
        yield Step(
            sends=(Message(after, *gives),) if gives[1] else (),
            receives=(Message(before, *takes),) if takes[1] else (),
        )
