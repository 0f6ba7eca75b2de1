"""How far each rank's clock is from rank 0's: measured by round trips, before and after what is traced.

A rank sends rank 0 a message and gets back what rank 0's clock shows. That was read between the sending and
the answer: in the middle, but for half of the round trip at most. Of several round trips the shortest tells
most. Two readings some time apart tell how the clocks drift, too.

Source: Mills 1991, "Internet Time Synchronization: The Network Time Protocol", section IV (the filter).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from minidist import comm

ROUNDS = 16
"""Round trips a reading: the shortest of them is one that nothing delayed."""
BYTES = 8 * ROUNDS
"""That each other rank sends for a reading; rank 0 sends as many to each."""
TAG = 2**29 + 8


@dataclass(frozen=True)
class Reading:
    """What a rank knows of rank 0's clock. Seconds of `time.perf_counter`.

    Attributes:
        at: this rank's clock when it was read.
        offset: what is to be added to this rank's clock to get rank 0's.
        error: by how much the offset may be wrong, half of the shortest round trip.
    """

    at: float
    offset: float
    error: float


def read() -> Reading:
    """Read rank 0's clock; all ranks do it together. Sends `BYTES`, and from rank 0 as many to each."""
    own, shown = comm.rank(), torch.zeros((), dtype=torch.float64, device=comm.device())
    best = Reading(time.perf_counter(), 0.0, 0.0)
    for other in range(1, comm.size()):
        if own == 0:
            for _ in range(ROUNDS):
                comm.recv(shown, other, TAG).item()
                comm.send(shown.fill_(time.perf_counter()), other, TAG)
        elif own == other:
            best = min((_round_trip(shown) for _ in range(ROUNDS)), key=lambda reading: reading.error)
    return best


def _round_trip(shown: torch.Tensor) -> Reading:
    sent = time.perf_counter()
    comm.send(shown, 0, TAG)
    theirs = comm.recv(shown, 0, TAG).item()
    came = time.perf_counter()
    middle = (sent + came) / 2
    return Reading(middle, theirs - middle, (came - sent) / 2)


@dataclass(frozen=True)
class Clock:
    """From this rank's clock to rank 0's, by a reading before and one after."""

    first: Reading
    last: Reading

    @property
    def same(self) -> bool:
        """Whether the two clocks are one, as far as can be told: on one host they are."""
        return all(abs(reading.offset) <= reading.error for reading in (self.first, self.last))

    @property
    def error(self) -> float:
        """By how many seconds `align` may be wrong; 0 where the clocks are one."""
        return 0.0 if self.same else max(self.first.error, self.last.error)

    def align(self, at: float) -> float:
        """What rank 0's clock showed when this rank's showed `at`. In between, clocks drift evenly."""
        if self.same:
            return at
        span = self.last.at - self.first.at
        weight = (at - self.first.at) / span if span > 0 else 0.0
        return at + self.first.offset + weight * (self.last.offset - self.first.offset)
