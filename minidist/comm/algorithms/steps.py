"""Messages, and the steps in which one rank sends and receives them.

In a step a rank offers all its sends at once, takes its receives in the order in which the step names them,
and goes on when its sends have been taken too. Two ranks exchange their messages in the order of their steps.
`check` proves schedules under these rules; `execute` overlaps steps where no data depends on it, and changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """Elements [start, stop) of a buffer, sent to or received from a peer."""

    peer: int  # the other rank, counted inside the group
    start: int
    stop: int
    reduce: bool = False  # for a receive: combine with the data there; False overwrites it

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """The messages that one rank sends and receives at once.

    A send carries what the buffer held before anything of this step arrived, even if something arrives in the
    same range (which costs a copy). Arrivals are stored in the order of the receives.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


def meet(a: Message, b: Message) -> bool:
    """Whether two messages have an element in common."""
    return a.start < b.stop and b.start < a.stop


def offsets(elements: int, parts: int) -> list[int]:
    """Cut `elements` into `parts` of nearly equal size: part i is [offsets[i], offsets[i + 1]).

    The first `elements % parts` have one element more; some are empty if there are fewer elements than parts.
    """
    size, more = divmod(elements, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]


def bytes_sent(steps: Iterable[Step], itemsize: int, rank: int | None = None) -> int:
    """Bytes that one rank's steps send. Messages to `rank` itself, as in an all-to-all, do not count."""
    return itemsize * sum(
        message.elements for step in steps for message in step.sends if message.peer != rank
    )
