"""What threads learn of each other by atomics: locks, flags, counters, tickets.

Who updates a place learns what all those knew who updated it before. So a lock orders what is done under it,
also where a plain store releases it, and a flag what was done before it was set. (A GPU promises that only
with fences, cuda.threadfence(); that one of those is missing is not found here.) It holds within a block; the
blocks of a kernel with such atomics are not compared with each other at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..machine.machine import Machine
from ..ptx.dtypes import Array

MOST = 1024  # places updated in one step, beyond which the warps are taken to learn all that there is to know


class AtomicOrder:
    """For each place that atomics update, and each block, what those knew who did."""

    def __init__(self, machine: Machine) -> None:
        self.clocks = machine.clocks
        self.numbers: dict[tuple[int, int], int] = {}  # (cluster, place): its row in `known`
        self.known = np.zeros((64, machine.clocks.agents), np.int32)
        self.took: set[tuple[int, int]] = set()  # (agent, place): who has updated what

    def take(self, places: Array, lanes: Array) -> None:
        """Let lanes take their turns, in order, at updating these places."""
        clocks = self.clocks
        agents = clocks.agents_of_lanes()[lanes]
        pairs = np.unique(np.stack([agents, places]), axis=1)  # by warp, then place
        agents, places = pairs[0], pairs[1]
        if agents.size > MOST:
            clusters = np.unique(agents // clocks.agents)
            clocks.now[clusters] = np.maximum(
                clocks.now[clusters], clocks.now[clusters].max(1, keepdims=True)
            )
        else:
            rows = self._rows(agents // clocks.agents, places)
            # All rows at once: the first warp of each, the second, ....
            order = np.argsort(rows, kind="stable")
            starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
            turn = np.arange(rows.size) - np.repeat(starts, np.diff(starts, append=rows.size))
            for i in range(int(turn.max()) + 1):
                now = order[turn == i]
                clocks.join(agents[now], self.known[rows[now]])
                self.known[rows[now]] = clocks.knows(agents[now][:, None], np.arange(clocks.agents))
        clocks.tick(np.unique(agents))
        self.took.update(zip(agents.tolist(), places.tolist(), strict=True))

    def are_over(self, places: Array, lanes: Array) -> bool:
        """Whether each lane's warp has updated its place before, so that a store there ends its turn."""
        agents = self.clocks.agents_of_lanes()[lanes]
        return all(pair in self.took for pair in zip(agents.tolist(), places.tolist(), strict=True))

    def _rows(self, clusters: Array, places: Array) -> NDArray[np.intp]:
        numbers = self.numbers
        found = [
            numbers.setdefault(key, len(numbers))
            for key in zip(clusters.tolist(), places.tolist(), strict=True)
        ]
        while len(numbers) > len(self.known):
            self.known = np.concatenate([self.known, np.zeros_like(self.known)])
        return np.array(found, np.intp)
