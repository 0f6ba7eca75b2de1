"""Execute a schedule without a process: the instructions of all ranks in an order in which they can run.

The rules are those of `Pipeline`. A send returns at once and keeps its tensor until it is received; a receive
waits for its message. Ranks therefore depend on each other through receives alone, and one execution proves
all: if every rank comes to its end in one order of events, it does so in every order.

The proof, the simulation, the acknowledgements of sends and the planner's times are all loops over `replay`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minidist.parallel.pipeline.instructions import (
    COMPUTE,
    Instruction,
    Schedule,
    StageMessage,
    message_of,
    moved,
)


class Deadlock(ValueError):
    """Every rank that has instructions left waits, at a receive, for a message that nobody will send."""

    def __init__(self, waiting: Mapping[int, Instruction], ranks: int) -> None:
        said = ", ".join(
            f"rank {rank} waits at {each} for rank {message_of(each, rank, ranks)[0].source}"
            for rank, each in waiting.items()
        )
        super().__init__(f"the schedule never ends: {said}")


def replay(schedule: Schedule) -> Iterator[tuple[int, Instruction, StageMessage | None]]:
    """Yield every instruction, after all that it depends on, with its rank and the message that it moves.

    Each rank runs as far as it can before the next rank has its turn. Raises Deadlock if no rank can go on.
    """
    ranks = len(schedule)
    done = [0] * ranks  # instructions of each rank
    sent: set[StageMessage] = set()
    while left := {rank: own[done[rank]] for rank, own in enumerate(schedule) if done[rank] < len(own)}:
        before = sum(done)
        for rank in left:
            own = schedule[rank]
            for index in range(done[rank], len(own)):
                each, message = own[index], None
                if each.kind not in COMPUTE:
                    message = moved(each, rank, ranks)
                    if each.kind.startswith("send"):
                        sent.add(message)
                    elif message not in sent:
                        break
                yield rank, each, message
                done[rank] += 1
        if sum(done) == before:
            raise Deadlock(left, ranks)
