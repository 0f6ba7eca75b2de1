"""Run one rank's steps over torch.distributed's send and receive.

Messages are cut into segments, and each segment has a place in the program's order. A segment is sent as
soon as what it carries has arrived, be it steps ahead, and some receives are always posted ahead, so that
the links carry data while this rank adds. What arrives to be added lands in a few segments of scratch, which
stay in the core's cache between the socket and the addition. With segments the second half of a ring begins
before its first half has ended, and a tree passes on the beginning of a tensor whose end has not come yet.

That this ends wherever `check` finds that the schedule ends rests on three rules: receives are posted and
awaited in the program's order; sends too, and a rank that waits in a step has offered all messages of that
step and those before it; it waits for a send only in or after the send's own step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from minidist.comm.algorithms.steps import Message, Step

TAG = 2**30
"""Tag of the messages, which no others should use."""
SEGMENT_BYTES = 2**19
"""Of a segment: it fits a core's second cache, and takes longer than a message costs."""
AHEAD = 4
"""Receives that are posted ahead."""

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda into, x: torch.minimum(into, x, out=into),
    "max": lambda into, x: torch.maximum(into, x, out=into),
}
"""For each `op` what combines a tensor with another in place."""


@dataclass
class _Send:
    peer: int
    start: int
    stop: int
    step: int
    needs: int = 0  # receives that have to be complete before: it carries what they bring
    work: Any = None  # torch's handle, kept until it was waited for, or gloo drops the message


@dataclass
class _Receive:
    peer: int
    start: int
    stop: int
    step: int
    reduce: bool
    number: int  # from 1, in the program's order
    needs: int = 0  # receives that have to be complete before anything is written to its place
    overwrites: list[_Send] = field(default_factory=list)  # sends that have to be through before that
    copy_from: int = -1  # of this rank's message to itself: where it begins in the source
    work: Any = None


_Segment = TypeVar("_Segment", _Send, _Receive)


def execute(
    steps: Iterable[Step],
    source: torch.Tensor,
    target: torch.Tensor,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
) -> int:
    """Run this rank's steps to their end; every rank of the group does so at once, with its own.

    Nothing else may use the group's tag `TAG` meanwhile: of two calls on one group the second starts when
    the first is through. It may run in any thread.

    Args:
        steps: one rank's, with peers counted inside the group.
        source: flat and contiguous; what sends name elements of. It may be `target` itself, and has to share
            no memory with it otherwise.
        target: flat and contiguous, of the same dtype; what receives name elements of.
        op: "sum", "min", "max" or "product", for receives that reduce.
        group: the ranks that take part; None for all.

    Returns:
        The bytes that this rank sent.

    Raises:
        ValueError: an unknown `op`, or a tensor that is not flat and contiguous.
        RuntimeError: torch's own, where a peer is gone or late.
    """
    if op not in COMBINE:
        raise ValueError(
            f"op is {op!r}; a step combines by {', '.join(COMBINE)}, and a mean is divided after"
        )
    for name, x in (("source", source), ("target", target)):
        if x.dim() != 1 or not x.is_contiguous() or x.dtype != source.dtype:
            raise ValueError(
                f"{name} is {x.dtype}{list(x.shape)} with strides {x.stride()}; "
                f"it has to be flat, contiguous and {source.dtype}: x.contiguous().view(-1)"
            )
    rank = dist.get_rank(group)
    if target.is_cuda:
        return _execute_in_batches(steps, source, target, COMBINE[op], rank, group)
    width = max(1, SEGMENT_BYTES // source.element_size())
    in_place = source.data_ptr() == target.data_ptr()
    sends, receives = _plan(steps, width, rank, in_place)
    _run(sends, receives, source, target, COMBINE[op], width, group)
    return sum(send.stop - send.start for send in sends) * source.element_size()


def _run(
    sends: list[_Send],
    receives: list[_Receive],
    source: torch.Tensor,
    target: torch.Tensor,
    combine: Callable[[torch.Tensor, torch.Tensor], object],
    width: int,
    group: dist.ProcessGroup | None,
) -> None:
    reduced = max((receive.stop - receive.start for receive in receives if receive.reduce), default=0)
    scratch = target.new_empty(min(AHEAD, len(receives)) * reduced)

    def place(index: int) -> torch.Tensor:
        """Where a segment lands."""
        receive = receives[index]
        if receive.reduce:
            first = index % AHEAD * reduced
            return scratch[first : first + receive.stop - receive.start]
        return target[receive.start : receive.stop]

    sent = posted = 0
    for done, receive in enumerate(receives):
        # Launch.
        sent = _launch(sends, sent, done, source, group)
        while posted < min(done + AHEAD, len(receives)):
            following = receives[posted]
            if not following.reduce:
                if following.needs > done or any(send.step > receive.step for send in following.overwrites):
                    break
                _finish(following.overwrites)
            if following.copy_from < 0:
                following.work = dist.irecv(place(posted), group=group, tag=TAG, group_src=following.peer)
            posted += 1
        # Wait.
        if receive.work is not None:
            receive.work.wait()
            receive.work = None
            arrived = place(done)
        else:
            size = receive.stop - receive.start
            arrived = source[receive.copy_from : receive.copy_from + size]
        # Compute.
        if receive.reduce:
            _finish(receive.overwrites)
            combine(target[receive.start : receive.stop], arrived)
        elif receive.copy_from >= 0:
            target[receive.start : receive.stop].copy_(arrived)
    _launch(sends, sent, len(receives), source, group)
    _finish(sends)


def _launch(
    sends: list[_Send], sent: int, done: int, source: torch.Tensor, group: dist.ProcessGroup | None
) -> int:
    """Start the sends whose data is there, in order; how many have been started."""
    while sent < len(sends) and sends[sent].needs <= done:
        send = sends[sent]
        send.work = dist.isend(source[send.start : send.stop], group=group, tag=TAG, group_dst=send.peer)
        sent += 1
    return sent


def _finish(sends: list[_Send]) -> None:
    for send in sends:
        if send.work is not None:
            send.work.wait()
            send.work = None


def _plan(steps: Iterable[Step], width: int, rank: int, in_place: bool) -> tuple[list[_Send], list[_Receive]]:
    """Segments in the program's order, each with those that it has to wait for."""
    sends: list[_Send] = []
    receives: list[_Receive] = []
    read, written = _Cells[_Send](width), _Cells[_Receive](width)
    for index, step in enumerate(steps):
        for message in step.sends:
            for start, stop in _segments(message, width) if message.peer != rank else ():
                send = _Send(message.peer, start, stop, index)
                if in_place:
                    send.needs = max((one.number for one in written.overlapping(start, stop)), default=0)
                    read.add(send)
                sends.append(send)
        to_itself = [message.start for message in step.sends if message.peer == rank]
        for message in step.receives:
            origin = to_itself.pop(0) - message.start if message.peer == rank else None
            for start, stop in _segments(message, width):
                receive = _Receive(message.peer, start, stop, index, message.reduce, len(receives) + 1)
                receive.needs = max((one.number for one in written.overlapping(start, stop)), default=0)
                receive.overwrites = read.overlapping(start, stop)
                read.forget(start, stop)
                written.forget(start, stop)
                written.add(receive)
                if origin is not None:
                    receive.copy_from = start + origin
                receives.append(receive)
    return sends, receives


class _Cells(Generic[_Segment]):
    """Segments by where they lie, so that those which overlap one are found in the time of a few."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.cells: dict[int, list[_Segment]] = {}

    def _of(self, start: int, stop: int) -> range:
        return range(start // self.width, (stop - 1) // self.width + 1)

    def add(self, segment: _Segment) -> None:
        for cell in self._of(segment.start, segment.stop):
            self.cells.setdefault(cell, []).append(segment)

    def overlapping(self, start: int, stop: int) -> list[_Segment]:
        return [
            segment
            for cell in self._of(start, stop)
            for segment in self.cells.get(cell, ())
            if segment.start < stop and start < segment.stop
        ]

    def forget(self, start: int, stop: int) -> None:
        """Those inside a segment that waits for them: who waits for it waits for them."""
        for cell in self._of(start, stop):
            self.cells[cell] = [
                segment
                for segment in self.cells.get(cell, ())
                if segment.start < start or stop < segment.stop
            ]


def _segments(message: Message, width: int) -> Iterator[tuple[int, int]]:
    """Cut from the message's start, so that both ends cut alike wherever the elements lie."""
    for start in range(message.start, message.stop, width):
        yield start, min(start + width, message.stop)


def _execute_in_batches(
    steps: Iterable[Step],
    source: torch.Tensor,
    target: torch.Tensor,
    combine: Callable[[torch.Tensor, torch.Tensor], object],
    rank: int,
    group: dist.ProcessGroup | None,
) -> int:
    """One batch a step: NCCL runs a pair's messages one after the other unless they are started together."""
    elements = 0
    for step in steps:
        sends = [message for message in step.sends if message.stop > message.start]
        receives = [message for message in step.receives if message.stop > message.start]
        pieces = [source[message.start : message.stop] for message in sends]
        places = [
            target.new_empty(message.elements) if message.reduce else target[message.start : message.stop]
            for message in receives
        ]
        own = [piece for message, piece in zip(sends, pieces, strict=True) if message.peer == rank]
        operations = [
            dist.P2POp(dist.isend, piece, group=group, tag=TAG, group_peer=message.peer)
            for message, piece in zip(sends, pieces, strict=True)
            if message.peer != rank
        ]
        operations += [
            dist.P2POp(dist.irecv, place, group=group, tag=TAG, group_peer=message.peer)
            for message, place in zip(receives, places, strict=True)
            if message.peer != rank
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for message, place in zip(receives, places, strict=True):
            if message.peer == rank:
                place.copy_(own.pop(0))
            if message.reduce:
                combine(target[message.start : message.stop], place)
        elements += sum(message.elements for message in sends if message.peer != rank)
    return elements * source.element_size()
