"""Find out that lanes go round in circles: a lock that nobody releases, a flag that nobody sets.

A machine is deterministic. If its registers, the places where its lanes stand and all that it can read are as
they were before, and every front has had its turns meanwhile, nothing will ever change, but for what others
write. One comparison of everything costs about as much as a turn, so it is made seldom, and only where the
few things that are quick to compare are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .machine import Machine

EVERY = 1024  # turns from one picture of the machine to the next
LASTS = 8 * EVERY  # turns for which a picture is kept


class Circles:
    """A picture of the machine now and then, and whether it is back there."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.turns = 0
        self.place: object = None  # of the front whose turn it was; None: there is no picture
        self.fronts: dict[tuple[int, int], NDArray[np.bool_]] = {}
        self.registers: list[NDArray[np.generic]] = []
        self.changes = (0, 0)
        self.waiting: set[tuple[int, int]] = set()  # fronts that have had no turn since
        self.returns, self.next = 0, 1  # how often it seemed to be back, and when to look closely

    def closed(self, place: tuple[int, int], running: dict[tuple[int, int], NDArray[np.bool_]]) -> bool:
        """Whether the machine, about to run the front at `place`, is back where it was."""
        self.turns += 1
        if self.place is None:
            if self.turns >= EVERY:
                self._take(place, running)
            return False
        changes = (self.machine.memory.changes, self.machine.events)
        if changes != self.changes or self.turns > LASTS:
            self.place, self.turns = None, 0
            return False
        back = place == self.place and not self.waiting and self._same(running)
        self.waiting.discard(place)
        if back:
            self.place, self.turns = None, EVERY
        return back

    def _take(self, place: tuple[int, int], running: dict[tuple[int, int], NDArray[np.bool_]]) -> None:
        machine = self.machine
        self.place, self.turns = place, 0
        self.fronts = dict(running)  # the arrays themselves are never written to
        self.registers = [file.copy() for file in machine.files.values()]
        self.changes = (machine.memory.changes, machine.events)
        self.waiting = {*running} - {place}
        self.returns, self.next = 0, 1

    def _same(self, running: dict[tuple[int, int], NDArray[np.bool_]]) -> bool:
        if running.keys() != self.fronts.keys():
            return False
        self.returns += 1
        if self.returns < self.next:
            return False
        self.next *= 2
        return all(np.array_equal(running[one], self.fronts[one]) for one in running) and all(
            np.array_equal(file, kept)
            for file, kept in zip(self.machine.files.values(), self.registers, strict=True)
        )
