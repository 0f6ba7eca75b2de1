"""What is known of one pass over units: which stay for all of it, and how far its backward pass has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from minidist.parallel.sharding.collective_order import UnitCollective
from minidist.parallel.sharding.units import Unit


class UnitPass:
    """One forward pass and the backward pass that may follow, or several where its graph is retained.

    Attributes:
        units: the one that was called, the root or a unit by itself, and those around it that have
            parameters of it; they are gathered for as long as the pass lasts.
        trains: whether a backward pass may follow.
        version: of the parameters.
        operations: that the backward pass has before it.
        reduced: units whose gradients it has reduced.
    """

    def __init__(self, units: Sequence[Unit], trains: bool, version: int) -> None:
        self.units, self.trains, self.version = units, trains, version
        self.operations: deque[UnitCollective] = deque()
        self.reduced: set[Unit] = set()
        self._order: Sequence[UnitCollective] = ()
        self._calls: list[int] = []
        self._left: dict[Unit, set[int]] = {}

    def close(self, order: Sequence[UnitCollective], calls: list[int]) -> None:
        """The forward pass is over: what a backward pass does, and how often each unit was called."""
        self._order, self._calls = order, calls
        self.start()

    def start(self) -> None:
        """A backward pass is to come."""
        self.operations = deque(self._order)
        self.reduced.clear()
        self._left.clear()

    def leave(self, unit: Unit, call: int) -> None:
        """The backward pass has left a call."""
        self._left.setdefault(unit, set()).add(call)

    def is_over(self, unit: Unit) -> bool:
        """Whether it has left all calls of a unit."""
        return len(self._left.get(unit, ())) == self._calls[unit.number]
