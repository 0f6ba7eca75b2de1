"""Cut one rank's messages into segments, in the program's order, and find what each has to wait for.

A send waits for the receives that bring its data. A receive that overwrites data waits until that data has
been sent, and until earlier receives into the same range have arrived. Nothing else waits: a ring's
all-gather begins before its reduce-scatter has ended, and a tree passes on the beginning of a tensor whose
end has not arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from minidist.comm.algorithms.steps import Message, Step

SEGMENT_BYTES = 2**20, 2**22
"""The smallest and the largest segment; in between it is half a message. Smaller ones cost more for waking
the threads at both ends than they gain by overlapping; larger ones need more scratch and gain nothing."""


@dataclass
class Send:
    """A segment to send."""

    peer: int
    start: int
    stop: int
    step: int  # whose message it is part of
    number: int  # from 1, in the program's order
    needs: int = 0  # so many receives have to be complete before it, which bring its data
    copied: bool = False  # a copy is sent, because data arrives in its range in the same step
    work: Any = None  # torch's handle, kept until its wait, because gloo drops the message with it


@dataclass
class Receive:
    """A segment to receive."""

    peer: int
    start: int
    stop: int
    step: int
    reduce: bool
    number: int  # from 1, in the program's order
    needs: int = 0  # so many receives have to be complete before it writes to its range
    overwrites: list[Send] = field(default_factory=list)  # sends of the data that it overwrites
    copy_from: int = -1  # start in the source, for this rank's message to itself
    work: Any = None


def cut_into_segments(
    steps: Iterable[Step], itemsize: int, rank: int, in_place: bool
) -> tuple[list[Send], list[Receive]]:
    """Cut the messages of one rank's steps into segments.

    A message of `rank` to itself becomes a copy, in the step that receives it. in_place: whether sends and
    receives name elements of the same buffer.
    """
    sends: list[Send] = []
    receives: list[Receive] = []
    width = SEGMENT_BYTES[0] // itemsize
    read, written = _Cells[Send](width), _Cells[Receive](width)
    for index, step in enumerate(steps):
        for message in step.sends:
            for start, stop in _segments(message, itemsize) if message.peer != rank else ():
                send = Send(message.peer, start, stop, index, len(sends) + 1)
                if in_place:
                    send.needs = max((one.number for one in written.overlapping(start, stop)), default=0)
                    read.add(send)
                sends.append(send)
        to_itself = [message.start for message in step.sends if message.peer == rank]
        for message in step.receives:
            shift = to_itself.pop(0) - message.start if message.peer == rank else 0
            for start, stop in _segments(message, itemsize):
                receive = Receive(message.peer, start, stop, index, message.reduce, len(receives) + 1)
                receive.needs = max((one.number for one in written.overlapping(start, stop)), default=0)
                receive.overwrites = read.overlapping(start, stop)
                for send in receive.overwrites:
                    send.copied |= send.step == index
                # Later segments wait for this one, and so for all that it waits for.
                read.forget(start, stop)
                written.forget(start, stop)
                written.add(receive)
                if message.peer == rank:
                    receive.copy_from = start + shift
                receives.append(receive)
    return sends, receives


def _segments(message: Message, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut a message from its start, so that both ends cut alike at any offset."""
    least, most = (size // itemsize for size in SEGMENT_BYTES)
    width = min(max(least, (message.elements + 1) // 2), most)
    for start in range(message.start, message.stop, width):
        yield start, min(start + width, message.stop)


_Segment = TypeVar("_Segment", Send, Receive)


class _Cells(Generic[_Segment]):
    """Segments by the cells of the buffer in which they lie, so that a few are searched for overlaps."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.cells: dict[int, list[_Segment]] = {}

    def of(self, start: int, stop: int) -> range:
        return range(start // self.width, (stop - 1) // self.width + 1)

    def add(self, segment: _Segment) -> None:
        for cell in self.of(segment.start, segment.stop):
            self.cells.setdefault(cell, []).append(segment)

    def overlapping(self, start: int, stop: int) -> list[_Segment]:
        return [
            segment
            for cell in self.of(start, stop)
            for segment in self.cells.get(cell, ())
            if segment.start < stop and start < segment.stop
        ]

    def forget(self, start: int, stop: int) -> None:
        """Forget the segments inside a range."""
        for cell in self.of(start, stop):
            if cell in self.cells:
                self.cells[cell] = [
                    segment for segment in self.cells[cell] if segment.start < start or stop < segment.stop
                ]
