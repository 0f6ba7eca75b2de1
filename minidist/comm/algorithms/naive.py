"""Naive: send everything to one rank, which reduces it and sends the result back.

A parameter server with synchronous workers does the same. It takes two steps, but rank 0 receives n - 1
tensors and sends n - 1 while the links between the other ranks lie idle, so its time grows with n; a ring's
does not.

Li et al., "Scaling distributed machine learning with the parameter server", 2014.
"""

from __future__ import annotations

from collections.abc import Iterator

from minidist.comm.algorithms.steps import Message, Step


def naive_all_reduce(rank: int, ranks: int, elements: int) -> Iterator[Step]:
    """All-reduce in place; rank 0 adds.

    Rank 0 sends (n - 1) S and each other rank S, in two steps.
    """
    if rank > 0:
        yield Step(sends=(Message(0, 0, elements),))
        yield Step(receives=(Message(0, 0, elements),))
    elif ranks > 1:
        others = range(1, ranks)
        yield Step(receives=tuple(Message(other, 0, elements, reduce=True) for other in others))
        yield Step(sends=tuple(Message(other, 0, elements) for other in others))
