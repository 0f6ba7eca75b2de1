"""Prove without starting a process that a schedule ends and that its result is right.

All ranks' steps run in one process by the rules in `steps.py`. The buffers count, for each element, how often
it contains each rank's contribution: a reduction is right if it contains each exactly once. A message is
taken only when both ends have reached it. That is the strictest rule about timing, so a schedule that ends
here ends with any buffering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minidist.comm.algorithms.registry import CollectiveSchedule
from minidist.comm.algorithms.steps import Message, Step, offsets

Contents = NDArray[np.int64]


class ScheduleError(ValueError):
    """A schedule does not end, or its result is wrong; the message names rank and step."""


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
    in_place = schedule.operation != "all_to_all"
    ranks = [_Rank(number, steps, in_place) for number, steps in enumerate(schedule.steps)]
    for rank in ranks:
        rank.enter(ranks, inputs[rank.number], 0)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while (delivery := rank.take(ranks)) is not None:
                moved = True
                yield delivery
        for rank in ranks:
            while rank.through():
                moved = True
                rank.finish(buffers[rank.number])
                rank.enter(ranks, inputs[rank.number], rank.free)
    waiting = [rank for rank in ranks if not rank.ended()]
    if waiting:
        raise ScheduleError(f"no rank goes on: {'; '.join(rank.waits_for() for rank in waiting)}")


@dataclass
class _Rank:
    """How far one rank has come."""

    number: int
    steps: tuple[Step, ...]
    in_place: bool  # whether its sends and receives name elements of one buffer
    step: int = -1
    entered: int = 0  # when it reached this step
    free: int = 0  # when the last message of this step was taken
    # This step's sends that are not taken yet, and its receives that have arrived.
    offered: list[tuple[Message, Contents]] = field(default_factory=list)
    taken: list[tuple[Message, Contents]] = field(default_factory=list)

    def ended(self) -> bool:
        return self.step >= len(self.steps)

    def expected(self) -> Message | None:
        """The next receive of this step; None if all have arrived."""
        receives = () if self.ended() else self.steps[self.step].receives
        return receives[len(self.taken)] if len(self.taken) < len(receives) else None

    def enter(self, ranks: list[_Rank], sent: Contents, now: int) -> None:
        """Go to the next step, and offer what it sends, as it is now."""
        self.step += 1
        self.entered = self.free = now
        if self.ended():
            return
        step, here = self.steps[self.step], f"rank {self.number} in step {self.step}"
        for message in (*step.sends, *step.receives):
            if not 0 <= message.peer < len(ranks):
                raise ScheduleError(f"{here} names rank {message.peer}; the ranks are 0 to {len(ranks) - 1}")
        for message in step.sends:
            _check_range(here, "sends", message, len(sent))
        self.offered = [(message, sent[message.start : message.stop].copy()) for message in step.sends]
        self.taken = []

    def take(self, ranks: list[_Rank]) -> Delivery | None:
        """The next message of this step, if its sender has reached it."""
        if (message := self.expected()) is None:
            return None
        sender = ranks[message.peer]
        index = next((i for i, (one, _) in enumerate(sender.offered) if one.peer == self.number), None)
        if index is None:
            return None
        sent, data = sender.offered[index]
        if sent.elements != message.elements:
            raise ScheduleError(
                f"rank {sender.number} in step {sender.step} sends {sent.elements} elements to rank "
                f"{self.number}, which in step {self.step} expects {message.elements}"
            )
        if self.in_place and sent.start != message.start:
            raise ScheduleError(
                f"rank {sender.number} in step {sender.step} sends elements from {sent.start} on to rank "
                f"{self.number}, which in step {self.step} puts them from {message.start} on"
            )
        del sender.offered[index]
        self.taken.append((message, data))
        begins = max(self.entered, sender.entered)
        self.free, sender.free = max(self.free, begins + 1), max(sender.free, begins + 1)
        return Delivery(sender.number, self.number, sent, message, begins)

    def through(self) -> bool:
        """Whether all messages of this step have been taken."""
        return not self.ended() and not self.offered and self.expected() is None

    def finish(self, buffer: Contents) -> None:
        """Store or add the messages that arrived in this step."""
        for message, data in self.taken:
            _check_range(f"rank {self.number} in step {self.step}", "receives", message, len(buffer))
            if message.reduce:
                buffer[message.start : message.stop] += data
            else:
                buffer[message.start : message.stop] = data

    def waits_for(self) -> str:
        """Say in words what this rank waits for."""
        reasons = [f"for rank {message.peer} to take a message" for message, _ in self.offered]
        if (message := self.expected()) is not None:
            reasons.append(f"for a message from rank {message.peer}")
        return f"rank {self.number} waits in step {self.step} {' and '.join(reasons)}"


def _check_range(who: str, what: str, message: Message, size: int) -> None:
    if not 0 <= message.start <= message.stop <= size:
        raise ScheduleError(f"{who} {what} [{message.start}, {message.stop}); the buffer has {size} elements")


def start(schedule: CollectiveSchedule) -> tuple[list[Contents], list[Contents]]:
    """The inputs and outputs of all ranks at the start; the same arrays where the operation works in place.

    Each is (elements, ranks + 1): how often an element contains each rank's contribution, and in the last
    column whether it was never filled. In an all-to-all, which only moves elements, it is (elements, 2): the
    rank that had the element, and its index there.
    """
    n, size = schedule.ranks, schedule.elements
    if schedule.operation == "all_to_all":
        counts = _counts(schedule)
        inputs = [
            np.stack([np.full(sum(row), rank), np.arange(sum(row))], axis=1)
            for rank, row in enumerate(counts)
        ]
        outputs = [np.full((sum(row[rank] for row in counts), 2), -1) for rank in range(n)]
        return inputs, outputs
    contribution: Contents = np.eye(n + 1, dtype=np.int64)
    buffers = [np.tile(contribution[rank], (size, 1)) for rank in range(n)]
    if schedule.operation == "all_gather":  # only a rank's own part is filled
        bounds = offsets(size, n)
        for rank, buffer in enumerate(buffers):
            buffer[: bounds[rank]] = buffer[bounds[rank + 1] :] = contribution[n]
    return buffers, buffers


def _check_result(schedule: CollectiveSchedule, buffers: list[Contents]) -> None:
    bounds = offsets(schedule.elements, schedule.ranks)
    for rank, buffer in enumerate(buffers):
        own = slice(bounds[rank], bounds[rank + 1]) if schedule.operation == "reduce_scatter" else slice(None)
        wanted = np.broadcast_to(_wanted(schedule, rank), buffer.shape)
        wrong = np.flatnonzero((buffer[own] != wanted[own]).any(axis=1))
        if len(wrong):
            element = int(wrong[0]) + (own.start or 0)
            raise ScheduleError(
                f"{schedule.operation}: element {element} of rank {rank} ends with "
                f"{_words(schedule, buffer[element])}; it should be {_words(schedule, wanted[element])}"
            )


def _wanted(schedule: CollectiveSchedule, rank: int) -> Contents:
    """Return what `rank` should end with; one row if it is the same for all elements."""
    n = schedule.ranks
    contribution: Contents = np.eye(n + 1, dtype=np.int64)
    if schedule.operation == "all_to_all":
        counts = _counts(schedule)
        firsts = [sum(row[:rank]) for row in counts]
        parts = [(other, firsts[other] + i) for other in range(n) for i in range(counts[other][rank])]
        return np.array(parts, dtype=np.int64).reshape(-1, 2)
    if schedule.operation == "broadcast":
        return contribution[schedule.source : schedule.source + 1]
    if schedule.operation == "all_gather":
        return np.repeat(contribution[:n], np.diff(offsets(schedule.elements, n)), axis=0)
    all_once: Contents = contribution[:n].sum(axis=0, keepdims=True)
    return all_once


def _counts(schedule: CollectiveSchedule) -> tuple[tuple[int, ...], ...]:
    if schedule.counts is not None:
        return schedule.counts
    row = tuple(np.diff(offsets(schedule.elements, schedule.ranks)).tolist())
    return (row,) * schedule.ranks


def _words(schedule: CollectiveSchedule, element: Contents) -> str:
    if schedule.operation == "all_to_all":
        return f"element {element[1]} of rank {element[0]}" if element[0] >= 0 else "nothing"
    *counts, unset = element.tolist()
    times = [f"rank {rank}'s {count} times" for rank, count in enumerate(counts) if count]
    times += ["what was there before"] if unset else []
    return ", ".join(times).replace(" 1 times", " once") or "nothing"
