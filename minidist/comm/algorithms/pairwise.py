"""Pairwise exchange: an all-to-all in which each rank talks to one other at a time.

In step k a rank sends to the rank k after it and receives from the rank k before it, so no rank gets two
messages at once while another gets none.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section
4.3 (long messages).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minidist.comm.algorithms.steps import Message, Step, offsets


def pairwise_all_to_all(
    rank: int,
    ranks: int,
    elements: int,
    input_offsets: Sequence[int] | None = None,
    output_offsets: Sequence[int] | None = None,
) -> Iterator[Step]:
    """All-to-all from one buffer into another: sends name elements of the input, receives of the output.

    A rank sends all of the input but its own part, (n - 1) / n S if the parts are equal, in n - 1 steps.
    Before them a first step copies its own part, as a message to itself.

    Args:
        rank: this rank.
        ranks: how many there are.
        elements: of the input, and of the output if the parts are equal.
        input_offsets: input[input_offsets[i] : input_offsets[i + 1]] is for rank i; None for equal parts.
        output_offsets: likewise the part of the output from rank i; None for equal parts.
    """
    gives = offsets(elements, ranks) if input_offsets is None else input_offsets
    # With equal parts, each part that arrives is as large as this rank's own part.
    own = gives[rank + 1] - gives[rank]
    takes = [own * i for i in range(ranks + 1)] if output_offsets is None else output_offsets
    for distance in range(ranks):
        to, of = (rank + distance) % ranks, (rank - distance) % ranks
        yield Step(
            sends=(Message(to, gives[to], gives[to + 1]),),
            receives=(Message(of, takes[of], takes[of + 1]),),
        )
