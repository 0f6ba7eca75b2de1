"""What operations that go on by themselves have in common: groups to wait for, and clocks of their own.

cp.async, bulk copies and wgmma are begun, put into groups (commit_group) and waited for (wait_group N: until
at most the last N groups are under way). The emulator carries one out as late as that allows, when it is
waited for, so that a kernel that does not wait works with what was there before.

In `clocks`, what a warp began acts as an agent beside it, who starts with all that the warp knows. Its
accesses are noted when it begins; the warp, and whoever it meets, learns of them by waiting. So an access in
between is a race, wherever the emulator has put it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..machine.races_in_shared_memory import Clocks
from ..ptx.dtypes import Array

OperationT = TypeVar("OperationT")


class AsyncGroups(Generic[OperationT]):
    """Operations under way, begun by members (lanes, or warp groups) that each count their own groups."""

    def __init__(self, members: int) -> None:
        self.committed = np.zeros(members, np.int64)  # groups that each member has made
        self.pending: list[tuple[OperationT, Array, Array]] = []  # with members, and the group of each

    def begin(self, operation: OperationT, members: Array) -> None:
        """Add an operation of `members` to the group that each of them has not closed yet."""
        self.pending.append((operation, members, self.committed[members]))

    def commit(self, members: Array) -> None:
        """Close the groups of these members."""
        self.committed[members] += 1

    def wait(self, members: Array, allowed: int) -> list[tuple[OperationT, NDArray[np.bool_]]]:
        """Take out what has to be done before at most `allowed` groups of these members are under way.

        In the order in which they began: each operation, and which of the members that it had left are due.
        """
        last = np.full(self.committed.size, -1, np.int64)  # groups up to this one are due
        last[members] = self.committed[members] - 1 - allowed
        due, left = [], []
        for operation, whose, group in self.pending:
            now = group <= last[whose]
            if now.any():
                due.append((operation, now))
            if not now.all():
                # An operation keeps all its members: those that are done have a group that never comes.
                left.append((operation, whose, np.where(now, np.iinfo(np.int64).max, group)))
        self.pending = [entry for entry in left if (entry[2] != np.iinfo(np.int64).max).any()]
        return due


def snapshot(clocks: Clocks, agents: Array) -> Array:
    """Return copies of the agents' vector clocks, (n, agents of a block)."""
    known: Array = clocks.knows(agents[:, None], np.arange(clocks.agents))
    return known


def begin(clocks: Clocks, warps: Array) -> tuple[Array, Array]:
    """Return the agents of what these warps (agents) begin, and what each knows, with its own time.

    When its accesses are noted, `clocks.tick` has to set the agents apart from what they begin next.
    """
    agents = warps + clocks.asynchronous
    clocks.join(agents, snapshot(clocks, warps))
    clocks.tick(warps)  # what the warps do next is not known to those who wait for this
    return agents, snapshot(clocks, agents)
