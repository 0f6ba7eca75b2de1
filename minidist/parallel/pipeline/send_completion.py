"""When a rank knows that a tensor it sent has been received, so that the memory can go.

A message tells its receiver what the sender had done by then, and what the sender had heard of others: a
vector clock. These clocks follow from the schedule alone, so nothing is sent for them.

On 4 ranks with 16 micro-batches a rank keeps at most 16 sent tensors in GPipe and 4 in 1F1B and zero-bubble.
In the interleaved schedule with 2 or 4 chunks it keeps 7. If a rank learned only what its direct neighbour
has received, it would keep 11 and 19 there; if a gradient's arrival acknowledged only the output that it
belongs to, 32 and 64, and 16 in 1F1B.

Source: Fidge 1988 and Mattern 1989 on vector clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minidist.parallel.pipeline.instructions import Instruction, Schedule, StageMessage, message_of
from minidist.parallel.pipeline.replay import replay

CompletedSends = Mapping[Instruction, Sequence[Instruction]]
"""For each receive of a rank: the sends that have certainly been received once it is complete."""


def completed_sends(schedule: Schedule) -> list[CompletedSends]:
    """For each rank of a schedule that passes `check`: the sends that each of its receives acknowledges."""
    ranks = len(schedule)
    received_at: dict[StageMessage, tuple[int, int]] = {}  # the receiver, and the index of its receive
    for rank, own in enumerate(schedule):
        for index, each in enumerate(own):
            if each.kind.startswith("recv"):
                received_at[message_of(each, rank, ranks)[1]] = rank, index
    known = [[0] * ranks for _ in schedule]  # how many instructions of each rank a rank knows to be done
    clocks: dict[StageMessage, list[int]] = {}  # what the sender of a message knew
    open_sends: list[dict[Instruction, tuple[int, int]]] = [{} for _ in schedule]
    found: list[dict[Instruction, list[Instruction]]] = [{} for _ in schedule]
    for rank, each, message in replay(schedule):
        if message is not None and each.kind.startswith("send"):
            clocks[message] = [*known[rank]]
            open_sends[rank][each] = received_at[message]
        elif message is not None:
            known[rank] = [*map(max, known[rank], clocks[message])]
            done = [send for send, (peer, index) in open_sends[rank].items() if known[rank][peer] > index]
            for send in done:
                del open_sends[rank][send]
            found[rank][each] = done
        known[rank][rank] += 1
    return [*found]
