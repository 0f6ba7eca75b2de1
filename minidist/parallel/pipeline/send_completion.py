"""When a rank knows that what it sent has been received, so that its memory can go.

A message that comes in says what its sender had done by then, and what that one had heard of others: a vector
clock. From a schedule alone these clocks follow, so nothing is sent for them.

Source: Fidge 1988 and Mattern 1989 on vector clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minidist.parallel.pipeline.instructions import Instruction, Schedule, StageMessage, message_of

Receipts = Mapping[Instruction, Sequence[Instruction]]
"""For each receive of a rank the sends that are known to be received once it is complete."""


class CompletionPlan(NamedTuple):
    """What one rank does."""

    instructions: Sequence[Instruction]
    receipts: Receipts


def receipts(schedule: Schedule) -> list[Receipts]:
    """For each rank of a schedule that passes `check` what its receives acknowledge."""
    ranks = len(schedule)
    taken: dict[StageMessage, int] = {}  # for each message where in its receiver's list it is received
    for rank, own in enumerate(schedule):
        for place, each in enumerate(own):
            if each.kind.startswith("recv"):
                taken[message_of(each, rank, ranks)[1]] = place
    known = [[0] * ranks for _ in schedule]  # how many instructions of each rank a rank knows to be done
    carried: dict[StageMessage, list[int]] = {}
    open_sends: list[list[tuple[Instruction, int, int]]] = [[] for _ in schedule]
    found: list[dict[Instruction, list[Instruction]]] = [{} for _ in schedule]
    places, moved = [0] * ranks, True
    while moved:
        moved = False
        for rank, own in enumerate(schedule):
            while places[rank] < len(own):
                each = own[places[rank]]
                if not each.computes:
                    channel, message = message_of(each, rank, ranks)
                    if each.kind.startswith("send"):
                        carried[message] = [*known[rank]]
                        open_sends[rank].append((each, channel.destination, taken[message]))
                    elif message in carried:
                        known[rank] = [*map(max, known[rank], carried[message])]
                        done = [e for e, to, place in open_sends[rank] if known[rank][to] > place]
                        open_sends[rank] = [one for one in open_sends[rank] if one[0] not in done]
                        found[rank][each] = done
                    else:
                        break
                places[rank] += 1
                known[rank][rank] = places[rank]
                moved = True
    return [*found]
