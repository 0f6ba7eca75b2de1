"""Prove without starting a process that a schedule ends and that its result is right.

All ranks' steps run in one process by the rules in `steps.py`. The buffers count, for each element, how often
it contains each rank's contribution: a reduction is right if it contains each exactly once. A message is
taken only when both ends have reached it. That is the strictest rule about timing, so a schedule that ends
here ends with any buffering. Nothing here needs NumPy or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from minidist.comm.algorithms.registry import CollectiveSchedule
from minidist.comm.algorithms.steps import Message, Step, offsets

Contents = list[Any]
"""An element of a reduction is a number with a digit for each rank: how often it contains that rank's
contribution. In an all-to-all, which only moves elements, it is the rank that had it, and its index there."""
DIGIT = 64  # bits: a schedule would have to double an element 64 times to spoil the next digit


class ScheduleError(ValueError):
    """A schedule does not end, or its result is wrong; the message names rank and step.

    waiting: if it does not end, each waiting rank and the ranks that it waits for.
    """

    def __init__(self, message: str, waiting: dict[int, list[int]] | None = None) -> None:
        super().__init__(message)
        self.waiting = waiting or {}


@dataclass(frozen=True)
class Delivery:
    """A message that was taken."""

    sender: int
    receiver: int
    sent: Message
    received: Message
    begins: int  # when both ends had reached it, if each message takes 1 unit of time


def check(schedule: CollectiveSchedule) -> None:
    """Check that every send meets its receive, that no rank waits for ever, and that the result is right.

    Time and memory grow with ranks x ranks x elements: it is meant for small tensors.

    Raises:
        ScheduleError: names the rank and the step at fault.
    """
    inputs, buffers = start(schedule)
    for _ in run(schedule, inputs, buffers):
        pass
    _check_result(schedule, buffers)


def run(schedule: CollectiveSchedule, inputs: list[Contents], buffers: list[Contents]) -> Iterator[Delivery]:
    """Run all ranks' steps, and yield each message as it is taken.

    inputs and buffers are those of `start`: for each rank, the rows that its sends and its receives name.

    Raises:
        ScheduleError: as in `check`, but for a wrong result.
    """
    ranks = [_Rank(number, steps) for number, steps in enumerate(schedule.steps)]
    in_place = schedule.operation != "all_to_all"  # sends and receives name elements of one buffer
    programs = [each.program(ranks, in_place, inputs[i], buffers[i]) for i, each in enumerate(ranks)]
    moved = True
    while moved:
        moved = False
        for rank, program in zip(ranks, programs, strict=True):
            step = rank.step
            while (delivery := next(program, None)) is not None:  # until it waits, or has ended
                moved = True
                yield delivery
            moved |= rank.step > step
    waiting = [rank for rank in ranks if rank.step < len(rank.steps)]
    if waiting:
        said = "; ".join(rank.waits_for() for rank in waiting)
        raise ScheduleError(f"no rank goes on: {said}", {rank.number: rank.peers() for rank in waiting})


@dataclass
class _Rank:
    """How far one rank has come."""

    number: int
    steps: tuple[Step, ...]
    step: int = -1  # the index of the one in which it is
    entered: int = 0  # when it reached this step
    free: int = 0  # when the last message of this step was taken
    offered: list[tuple[Message, Contents]] = field(default_factory=list)  # sends that are not taken yet
    expected: Message | None = None  # the receive for which it waits

    def program(
        self, ranks: list[_Rank], in_place: bool, sent: Contents, buffer: Contents
    ) -> Iterator[Delivery | None]:
        """Run the steps: yield each message when this rank takes it, and None where it has to wait."""
        for index, step in enumerate(self.steps):
            self.step, here = index, f"rank {self.number} in step {index}"
            for message in (*step.sends, *step.receives):
                if not 0 <= message.peer < len(ranks):
                    last = len(ranks) - 1
                    raise ScheduleError(f"{here} names rank {message.peer}; the ranks are 0 to {last}")
            for message in step.sends:
                _check_range(here, "sends", message, len(sent))
            # Offer what it sends, as it is now, before anything arrives.
            self.offered = [(message, sent[message.start : message.stop].copy()) for message in step.sends]
            self.entered, arrived = self.free, list[tuple[Message, Contents]]()
            for message in step.receives:
                sender, self.expected = ranks[message.peer], message
                while not (offers := [each for each in sender.offered if each[0].peer == self.number]):
                    yield None
                _check_alike(sender, offers[0][0], self, message, in_place)
                sender.offered.remove(offers[0])
                arrived.append((message, offers[0][1]))
                begins = max(self.entered, sender.entered)
                self.free, sender.free = max(self.free, begins + 1), max(sender.free, begins + 1)
                yield Delivery(sender.number, self.number, offers[0][0], message, begins)
            self.expected = None
            while self.offered:
                yield None
            for message, data in arrived:
                _check_range(here, "receives", message, len(buffer))
                if message.reduce:
                    there = buffer[message.start : message.stop]
                    data = [old + new for old, new in zip(there, data, strict=True)]
                buffer[message.start : message.stop] = data
        self.step = len(self.steps)

    def peers(self) -> list[int]:
        """The ranks that this rank waits for."""
        return [message.peer for message, _ in self.offered] + ([self.expected.peer] if self.expected else [])

    def waits_for(self) -> str:
        """Say in words what this rank waits for."""
        reasons = [f"for rank {message.peer} to take a message" for message, _ in self.offered]
        if self.expected is not None:
            reasons.append(f"for a message from rank {self.expected.peer}")
        return f"rank {self.number} waits in step {self.step} {' and '.join(reasons)}"


def _check_alike(sender: _Rank, sent: Message, receiver: _Rank, message: Message, in_place: bool) -> None:
    """Compare a message as its sender names it with what its receiver expects."""
    begins = f"rank {sender.number} in step {sender.step} sends"
    ends = f"to rank {receiver.number}, which in step {receiver.step}"
    if sent.elements != message.elements:
        raise ScheduleError(f"{begins} {sent.elements} elements {ends} expects {message.elements}")
    if in_place and sent.start != message.start:
        puts = f"puts them from {message.start} on"
        raise ScheduleError(f"{begins} elements from {sent.start} on {ends} {puts}")


def _check_range(who: str, what: str, message: Message, size: int) -> None:
    if not 0 <= message.start <= message.stop <= size:
        raise ScheduleError(f"{who} {what} [{message.start}, {message.stop}); the buffer has {size} elements")


def start(schedule: CollectiveSchedule) -> tuple[list[Contents], list[Contents]]:
    """The inputs and outputs of all ranks at the start; the same lists where the operation works in place.

    The digit after the last rank's says whether an element was never filled.
    """
    n, size = schedule.ranks, schedule.elements
    if schedule.operation == "all_to_all":
        counts = _counts(schedule)
        inputs: list[Contents] = [[(rank, i) for i in range(sum(row))] for rank, row in enumerate(counts)]
        outputs: list[Contents] = [[(-1, -1)] * sum(row[rank] for row in counts) for rank in range(n)]
        return inputs, outputs
    buffers: list[Contents] = [[_once(rank)] * size for rank in range(n)]
    if schedule.operation == "all_gather":  # only a rank's own part is filled
        bounds = offsets(size, n)
        for rank, buffer in enumerate(buffers):
            first, last = bounds[rank], bounds[rank + 1]
            buffer[:first], buffer[last:] = [_once(n)] * first, [_once(n)] * (size - last)
    return buffers, buffers


def _once(rank: int) -> int:
    """An element that contains a rank's contribution once, and nothing else."""
    return 1 << DIGIT * rank


def _check_result(schedule: CollectiveSchedule, buffers: list[Contents]) -> None:
    bounds = offsets(schedule.elements, schedule.ranks)
    for rank, buffer in enumerate(buffers):
        own = range(len(buffer))
        if schedule.operation == "reduce_scatter":
            own = range(bounds[rank], bounds[rank + 1])
        wanted = _wanted(schedule, rank, len(buffer))
        element = next((i for i in own if buffer[i] != wanted[i]), None)
        if element is not None:
            raise ScheduleError(
                f"{schedule.operation}: element {element} of rank {rank} ends with "
                f"{_words(schedule, buffer[element])}; it should be {_words(schedule, wanted[element])}"
            )


def _wanted(schedule: CollectiveSchedule, rank: int, size: int) -> Contents:
    """What the elements of `rank` should be in the end."""
    n = schedule.ranks
    if schedule.operation == "all_to_all":
        counts = _counts(schedule)
        firsts = [sum(row[:rank]) for row in counts]
        return [(other, firsts[other] + i) for other in range(n) for i in range(counts[other][rank])]
    if schedule.operation == "broadcast":
        return [_once(schedule.source)] * size
    if schedule.operation == "all_gather":
        return [_once(other) for other, part in enumerate(_parts(schedule)) for _ in range(part)]
    return [sum(map(_once, range(n)))] * size


def _parts(schedule: CollectiveSchedule) -> tuple[int, ...]:
    """Elements of each rank's part of the buffer."""
    bounds = offsets(schedule.elements, schedule.ranks)
    return tuple(stop - start for start, stop in pairwise(bounds))


def _counts(schedule: CollectiveSchedule) -> tuple[tuple[int, ...], ...]:
    return schedule.counts or (_parts(schedule),) * schedule.ranks


def _words(schedule: CollectiveSchedule, element: Any) -> str:
    if schedule.operation == "all_to_all":
        moved = zip(element[::2], element[1::2], strict=True)
        return " and ".join(f"element {i} of rank {rank}" for rank, i in moved if rank >= 0) or "nothing"
    *counts, unset = (element >> DIGIT * rank & (1 << DIGIT) - 1 for rank in range(schedule.ranks + 1))
    times = [f"rank {rank}'s {count} times" for rank, count in enumerate(counts) if count]
    times += ["what was there before"] if unset else []
    return ", ".join(times).replace(" 1 times", " once") or "nothing"
