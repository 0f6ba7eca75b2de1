"""Run one rank's steps over torch.distributed's send and receive.

Messages are cut into segments, in the program's order. A segment is sent as soon as the data that it carries
has arrived, even steps ahead, and a few receives are always posted ahead, so that the links carry data while
this rank adds. Data to be added lands in as many segments of scratch.

A send waits for the receives that bring its data. A receive that overwrites data waits until that data has
been sent, and until earlier receives into the same range have arrived. Nothing else waits: a ring's
all-gather begins before its reduce-scatter has ended, and a tree passes on the beginning of a tensor whose
end has not arrived.

If `check` finds that a schedule ends, it ends here too, for three reasons. Receives are posted and awaited in
the program's order. A rank that waits in a step has offered all sends of that step and of those before it. It
waits for a send only to overwrite data that was sent in an earlier step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from minidist.comm.algorithms.steps import Message, Step, meet

TAG = 2**30
"""Tag of these messages, which no others should use."""
AHEAD = 4
"""Receives that are posted ahead, and thus the segments of scratch."""
SEGMENT_BYTES = 2**20, 2**22
"""The smallest and the largest segment; in between it is half a message. Smaller ones cost more for waking
the threads at both ends than they gain by overlapping; larger ones need more scratch and gain nothing."""

Combine = Callable[..., torch.Tensor]
COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""For each `op` the function that combines two tensors into `out`."""

_kept = threading.local()
"""A thread's scratch, at most `AHEAD` segments."""


def execute(
    steps: Iterable[Step],
    source: torch.Tensor,
    target: torch.Tensor,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
) -> int:
    """Run this rank's steps to their end, while every other rank of the group runs its own.

    It may run in any thread. Nothing else may use the group's tag `TAG` meanwhile, so a second call on the
    group has to wait for the first.

    Args:
        steps: this rank's, with peers counted inside the group.
        source: flat and contiguous; sends name its elements. It is `target` itself, or shares no memory with
            it.
        target: flat and contiguous, of the same dtype; receives name its elements.
        op: "sum", "min", "max" or "product", for receives that reduce; a mean is divided after.
        group: the ranks that take part; None for all.

    Returns:
        The bytes that this rank sent to others.

    Raises:
        ValueError: an unknown `op`, or a tensor that is not flat and contiguous.
        RuntimeError: from torch, if a peer is gone or late.
    """
    flat = all(x.dim() == 1 and x.is_contiguous() and x.dtype == source.dtype for x in (source, target))
    if op not in COMBINE or not flat:
        raise ValueError(
            f"op is {op!r}, source {source.dtype}{[*source.shape]}, target {target.dtype}{[*target.shape]}; "
            f"op is one of {', '.join(COMBINE)}, and both are flat, contiguous and of one dtype"
        )
    rank = dist.get_rank(group)
    if target.is_cuda:
        return in_batches(steps, source, target, COMBINE[op], rank, group)
    in_place = source.data_ptr() == target.data_ptr()
    sends, receives = cut_into_segments(steps, source.element_size(), rank, in_place)
    try:
        _run(sends, receives, source, target, COMBINE[op], group)
    except BaseException:
        vars(_kept).clear()  # late data may still arrive in it
        raise
    return sum(send.stop - send.start for send in sends) * source.element_size()


def _run(
    sends: list[Send],
    receives: list[Receive],
    source: torch.Tensor,
    target: torch.Tensor,
    combine: Combine,
    group: dist.ProcessGroup | None,
) -> None:
    largest = max((receive.stop - receive.start for receive in receives if receive.reduce), default=0)
    scratch = _scratch(min(AHEAD, len(receives)) * largest, target)

    def landing(index: int) -> torch.Tensor:
        receive = receives[index]
        if not receive.reduce:
            return target[receive.start : receive.stop]
        first = index % AHEAD * largest
        return scratch[first : first + receive.stop - receive.start]

    sent = posted = 0
    for done, receive in enumerate(receives):
        # Launch.
        sent = _launch(sends, sent, done, source, group)
        while posted < min(done + AHEAD, len(receives)):
            following = receives[posted]
            if not following.reduce:
                if following.needs > done:
                    break
                _finish(following.overwrites)
            if following.copy_from < 0:
                following.work = dist.irecv(landing(posted), group=group, tag=TAG, group_src=following.peer)
            posted += 1
        # Wait.
        if receive.work is not None:
            receive.work.wait()
            receive.work = None
            arrived = landing(done)
        else:
            arrived = source[receive.copy_from : receive.copy_from + receive.stop - receive.start]
        # Compute.
        if receive.reduce:
            _finish(receive.overwrites)
            into = target[receive.start : receive.stop]
            combine(into, arrived, out=into)
        elif receive.copy_from >= 0:
            target[receive.start : receive.stop].copy_(arrived)
    _launch(sends, sent, len(receives), source, group)
    _finish(sends, copied=True)


def _launch(
    sends: list[Send], sent: int, done: int, source: torch.Tensor, group: dist.ProcessGroup | None
) -> int:
    """Start the sends whose data is there, in order; returns how many have been started."""
    while sent < len(sends) and sends[sent].needs <= done:
        send = sends[sent]
        data = source[send.start : send.stop]
        data = data.clone() if send.copied else data
        send.work = dist.isend(data, group=group, tag=TAG, group_dst=send.peer)
        sent += 1
    return sent


def _finish(sends: list[Send], copied: bool = False) -> None:
    """Wait for sends whose data is to be overwritten; with `copied` also for sends of copies."""
    for send in sends:
        if send.work is not None and (copied or not send.copied):
            send.work.wait()
            send.work = None


def _scratch(elements: int, like: torch.Tensor) -> torch.Tensor:
    """Return this thread's scratch. It is kept: touching fresh memory costs as much as adding."""
    size = elements * like.element_size()
    kept: torch.Tensor | None = getattr(_kept, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _kept.scratch = torch.empty(size, dtype=torch.uint8)
    return kept[:size].view(like.dtype)


def in_batches(
    steps: Iterable[Step],
    source: torch.Tensor,
    target: torch.Tensor,
    combine: Combine,
    rank: int,
    group: dist.ProcessGroup | None,
) -> int:
    """Run the steps with one batch of messages a step, for tensors on GPUs.

    NCCL runs a pair's messages one after the other unless they are started together, so two ranks that both
    receive first would wait for ever.
    """
    elements = 0
    for step in steps:
        operations, to_itself, arrivals = [], [], []
        for message in step.sends:
            piece = source[message.start : message.stop]
            if message.peer == rank:
                to_itself.append(piece)
            elif message.elements:
                elements += message.elements
                if any(meet(message, other) for other in step.receives if source is target):
                    piece = piece.clone()
                operations.append(
                    dist.P2POp(dist.isend, piece, group=group, tag=TAG, group_peer=message.peer)
                )
        for message in step.receives:
            into = target[message.start : message.stop]
            arrived = torch.empty_like(into) if message.reduce else into
            if message.peer == rank:
                arrived.copy_(to_itself.pop(0))
            elif message.elements:
                operations.append(
                    dist.P2POp(dist.irecv, arrived, group=group, tag=TAG, group_peer=message.peer)
                )
            if message.reduce:
                arrivals.append((into, arrived))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for into, arrived in arrivals:
            combine(into, arrived, out=into)
    return elements * source.element_size()


# Segments


@dataclass
class Send:
    """A segment to send."""

    peer: int
    start: int
    stop: int
    step: int  # whose message it is part of
    reached: int  # so many receives belong to the steps before it
    needs: int = 0  # so many receives have to be complete before it, which bring its data
    copied: bool = False  # a copy is sent, because data arrives in its range in the same step
    work: Any = None  # torch's handle, kept until its wait, because gloo drops the message with it


@dataclass
class Receive:
    """A segment to receive."""

    peer: int
    start: int
    stop: int
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
                send = Send(message.peer, start, stop, index, len(receives))
                if in_place:
                    send.needs = max((one.number for one in written.overlapping(start, stop)), default=0)
                    read.add(send)
                sends.append(send)
        to_itself = [message.start for message in step.sends if message.peer == rank]
        for message in step.receives:
            shift = to_itself.pop(0) - message.start if message.peer == rank else 0
            for start, stop in _segments(message, itemsize):
                receive = Receive(message.peer, start, stop, message.reduce, len(receives) + 1)
                receive.overwrites = read.overlapping(start, stop)
                # A send that is not even offered would carry the new data, and one of a step ahead may wait
                # for work that this rank has yet to do.
                earlier = [one.number for one in written.overlapping(start, stop)]
                receive.needs = max([*earlier, *(send.reached for send in receive.overwrites)], default=0)
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
