"""Detect a livelock: lanes that loop for ever on a lock nobody releases, or a flag nobody sets.

A machine is deterministic. If its registers, the program points of its lanes, and all that it can read are
the same as before, and every group of lanes has run since, then only another machine's write can ever change
anything. A full comparison costs about as much as running a block of instructions. So it is rare, and happens
only when the few things that are cheap to compare are equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..machine.machine import Machine
from ..ptx.dtypes import Lanes

EVERY = 1024  # runs of a block from one snapshot of the machine to the next
LASTS = 8 * EVERY  # runs for which a snapshot is kept


class LivelockDetector:
    """Takes a snapshot of the machine now and then, and tells when the machine is back in that state."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.runs = 0
        self.point: object = None  # the program point that ran next at the snapshot; None: no snapshot
        self.lanes: dict[tuple[int, int], Lanes] = {}  # by program point
        self.registers: list[NDArray[np.generic]] = []
        self.changes = (0, 0)
        self.not_run: set[tuple[int, int]] = set()  # program points that have not run since the snapshot
        self.returns, self.next = 0, 1  # how often it looked like the snapshot, and when to compare all

    def repeats(self, point: tuple[int, int], running: dict[tuple[int, int], Lanes]) -> bool:
        """Return whether the machine, about to run the lanes at `point`, is back in an earlier state."""
        self.runs += 1
        if self.point is None:
            if self.runs >= EVERY:
                self._take_snapshot(point, running)
            return False
        changes = (self.machine.memory.changes, self.machine.events)
        if changes != self.changes or self.runs > LASTS:
            self.point, self.runs = None, 0
            return False
        back = point == self.point and not self.not_run and self._same(running)
        self.not_run.discard(point)
        if back:
            self.point, self.runs = None, EVERY
        return back

    def _take_snapshot(self, point: tuple[int, int], running: dict[tuple[int, int], Lanes]) -> None:
        machine = self.machine
        self.point, self.runs = point, 0
        self.lanes = dict(running)  # nothing writes to these arrays
        self.registers = [file.copy() for file in machine.files.values()]
        self.changes = (machine.memory.changes, machine.events)
        self.not_run = {*running} - {point}
        self.returns, self.next = 0, 1

    def _same(self, running: dict[tuple[int, int], Lanes]) -> bool:
        if running.keys() != self.lanes.keys():
            return False
        self.returns += 1
        if self.returns < self.next:
            return False
        self.next *= 2
        return all(np.array_equal(running[one], self.lanes[one]) for one in running) and all(
            np.array_equal(file, kept)
            for file, kept in zip(self.machine.files.values(), self.registers, strict=True)
        )
