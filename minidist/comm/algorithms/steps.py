"""What an algorithm is made of: messages, and the steps in which one rank sends and receives them.

A step is what a rank does at once. It offers all its messages, takes those that come in the order in which
the step names them, and goes on when its own have been taken too. Two ranks exchange their messages in the
order of their steps. That is the meaning that `check` proves things about; `execute` overlaps steps where no
data depends on it, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """Elements [start, stop) of a buffer, on their way to or from a peer."""

    peer: int  # the other rank, counted inside the group
    start: int
    stop: int
    reduce: bool = False  # of one received: combine it with what is there, where False overwrites that

    @property
    def elements(self) -> int:
        """How many elements it carries."""
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """What one rank does at once, before it waits for its messages.

    What it sends is what the buffer held before anything of this step arrived, also where something arrives
    in its place (which costs a copy). What arrives is put there in the order of the receives.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


def meet(a: Message, b: Message) -> bool:
    """Whether two messages name an element in common."""
    return a.start < b.stop and b.start < a.stop


def offsets(elements: int, parts: int) -> list[int]:
    """Cut `elements` into `parts` of nearly equal size: part i is [offsets[i], offsets[i + 1]).

    The first `elements % parts` have one element more, and some are empty where there are fewer elements
    than parts.
    """
    size, more = divmod(elements, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]


def bytes_sent(steps: Iterable[Step], itemsize: int, rank: int | None = None) -> int:
    """Bytes that these steps send, with elements of `itemsize` bytes.

    Args:
        steps: one rank's.
        itemsize: bytes of an element.
        rank: whose steps they are; what it sends to itself, as in an all-to-all, is then not counted.
    """
    return itemsize * sum(
        message.elements for step in steps for message in step.sends if message.peer != rank
    )
