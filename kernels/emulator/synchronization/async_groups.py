"""Asynchronous operations: groups that threads wait for, and clocks of their own.

Threads begin cp.async, bulk copies and wgmma, put them into groups (commit_group), and wait (wait_group N:
until at most the last N groups are under way). The emulator carries each out as late as that allows, so a
kernel that does not wait works with the old data.

For the clocks, a warp's asynchronous work is an agent of its own that starts with all that the warp knows.
Its accesses are noted when it begins. The warp, and whoever meets the warp, learns of them by waiting. So any
access in between is a race, no matter when the emulator carries the operation out.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from ..machine.races_in_shared_memory import Clocks
from ..ptx.dtypes import Array, Lanes

OperationT = TypeVar("OperationT")


class AsyncGroups(Generic[OperationT]):
    """Operations under way. Their members (lanes, or warp groups) each count their own groups."""

    def __init__(self, members: int) -> None:
        self.committed = np.zeros(members, np.int64)  # groups that each member has closed
        self.pending: list[tuple[OperationT, Array, Array]] = []  # (operation, members, their groups)

    def begin(self, operation: OperationT, members: Array) -> None:
        """Add an operation of `members` to the open group of each of them."""
        self.pending.append((operation, members, self.committed[members]))

    def commit(self, members: Array) -> None:
        """Close the open groups of these members."""
        self.committed[members] += 1

    def wait(self, members: Array, allowed: int) -> list[tuple[OperationT, Lanes]]:
        """Take out what must complete so that at most `allowed` groups of each member are under way.

        Returns, in the order in which they began, each operation and which of its members are due.
        """
        last = np.full(self.committed.size, -1, np.int64)  # groups up to this one are due
        last[members] = self.committed[members] - 1 - allowed
        due, left = [], []
        for operation, whose, group in self.pending:
            now = group <= last[whose]
            if now.any():
                due.append((operation, now))
            if not now.all():
                # An operation keeps all its members; a member that is done gets a group that never comes.
                left.append((operation, whose, np.where(now, np.iinfo(np.int64).max, group)))
        self.pending = [entry for entry in left if (entry[2] != np.iinfo(np.int64).max).any()]
        return due


def snapshot(clocks: Clocks, agents: Array) -> Array:
    """Return copies of the agents' vector clocks, (n, agents of a block)."""
    return clocks.knows(agents[:, None], np.arange(clocks.agents))


def begin(clocks: Clocks, warps: Array) -> tuple[Array, Array]:
    """Begin asynchronous work of these warps (agents): return its agents and their vector clocks.

    After noting its accesses, call `clocks.tick` to separate it from the work that they begin next.
    """
    agents = warps + clocks.asynchronous
    clocks.join(agents, snapshot(clocks, warps))
    clocks.tick(warps)  # waiting for this work teaches nothing of what the warps do next
    return agents, snapshot(clocks, agents)
