"""Recursive halving and doubling: a ring's bytes in a tree's number of steps.

First neighbours exchange halves, so that each has a half reduced over two ranks; then ranks at distance 2
exchange halves of that half, and so on. After log2 n steps each rank holds 1/n of the result. The same steps
backwards, without adding, double what each rank has until it is whole. That needs a power of two: with more
ranks, some first add their tensor to a neighbour's, and get the result from it at the end.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section
4.5 (Rabenseifner's algorithm).
"""

from __future__ import annotations

from collections.abc import Iterator

from minidist.comm.algorithms.steps import Message, Step, offsets


def halving_doubling_all_reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-reduce in place.

    With p the largest power of two up to n, a rank sends 2 (p - 1) / p S in 2 log2 p steps. If n is larger,
    the first n - p pairs of ranks fold, in two more steps: the even rank sends S and nothing else, the odd
    one S more than above.
    """
    power = 1 << (ranks.bit_length() - 1)
    folded = ranks - power  # pairs (0, 1), (2, 3), ... only the second rank of each goes on

    if rank < 2 * folded and rank % 2 == 0:
        yield Step(sends=(Message(rank + 1, 0, elements),))
        yield Step(receives=(Message(rank + 1, 0, elements),))
        return
    if rank < 2 * folded:
        yield Step(receives=(Message(rank - 1, 0, elements, reduce=True),))

    # Ranks that go on are numbered anew; their ranges are counted in parts of 1/p of the tensor.
    index = rank // 2 if rank < 2 * folded else rank - folded
    bounds = offsets(elements, power)
    first, last = 0, power
    # The peer of each step, the range that stays here and the range that goes there.
    halvings: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    for bit in range(power.bit_length() - 1):
        partner = index ^ (1 << bit)
        middle = (first + last) // 2
        low, high = (first, middle), (middle, last)
        kept, given = (low, high) if index < partner else (high, low)
        peer = 2 * partner + 1 if partner < folded else partner + folded
        halvings.append((peer, (bounds[kept[0]], bounds[kept[1]]), (bounds[given[0]], bounds[given[1]])))
        first, last = kept

    for peer, kept, given in halvings:
        yield Step(sends=(Message(peer, *given),), receives=(Message(peer, *kept, reduce=True),))
    for peer, kept, given in reversed(halvings):
        yield Step(sends=(Message(peer, *kept),), receives=(Message(peer, *given),))

    if rank < 2 * folded:
        yield Step(sends=(Message(rank - 1, 0, elements),))
