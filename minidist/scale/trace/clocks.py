"""The offset of each rank's clock from rank 0's, measured by round trips before and after a trace.

A rank sends rank 0 a message and gets back the time of rank 0's clock. Rank 0 read it between the send and
the answer: in the middle, with an error of at most half the round trip. Of several round trips the shortest
is the most exact. Two readings, before and after, also show how the clocks drift.

Source: Mills 1991, "Internet Time Synchronization: The Network Time Protocol", section IV (the filter).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from minidist import comm

ROUNDS = 16
"""Round trips per reading, so that the shortest is one that nothing delayed."""
BYTES = 8 * ROUNDS
"""Bytes that rank 0 and each other rank send each other for a reading."""
TAG = 2**29 + 8


@dataclass(frozen=True)
class Reading:
    """The offset of a rank's clock from rank 0's, in seconds of `time.perf_counter`."""

    at: float  # time of this rank's clock
    offset: float  # rank 0's clock minus this rank's
    error: float  # by how much the offset may be wrong: half of the shortest round trip


def read() -> Reading:
    """Read rank 0's clock. A collective; each rank exchanges `BYTES` with rank 0."""
    own, shown = comm.rank(), torch.zeros((), dtype=torch.float64, device=comm.device())
    best = Reading(time.perf_counter(), 0.0, 0.0)
    for other in range(1, comm.size()):
        if own == 0:
            for _ in range(ROUNDS):
                comm.recv(shown, other, TAG).item()
                comm.send(shown.fill_(time.perf_counter()), other, TAG)
        elif own == other:
            readings = []
            for _ in range(ROUNDS):
                sent = time.perf_counter()
                comm.send(shown, 0, TAG)
                theirs, came = comm.recv(shown, 0, TAG).item(), time.perf_counter()
                middle = (sent + came) / 2
                readings.append(Reading(middle, theirs - middle, (came - sent) / 2))
            best = min(readings, key=lambda reading: reading.error)
    return best


@dataclass(frozen=True)
class Clock:
    """Converts this rank's times to rank 0's, by a reading before the trace and one after."""

    first: Reading
    last: Reading

    @property
    def same(self) -> bool:
        """Whether the readings allow that both ranks use the same clock, as on one host."""
        return all(abs(reading.offset) <= reading.error for reading in (self.first, self.last))

    @property
    def error(self) -> float:
        """By how many seconds `align` may be wrong; 0 for the same clock."""
        return 0.0 if self.same else max(self.first.error, self.last.error)

    def align(self, at: float) -> float:
        """The time of rank 0's clock when this rank's showed `at`, if the clocks drift evenly."""
        if self.same:
            return at
        span = self.last.at - self.first.at
        weight = (at - self.first.at) / span if span > 0 else 0.0
        return at + self.first.offset + weight * (self.last.offset - self.first.offset)
