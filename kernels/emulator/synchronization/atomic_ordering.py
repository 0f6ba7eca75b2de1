"""The order that atomics give threads: locks, flags, counters, tickets.

A warp that updates an address learns all that the earlier updaters of this address knew. So a lock orders
what is done under it, also if a plain store releases it, and a flag orders what was done before it was set.
(A GPU promises that only with fences, cuda.threadfence(); the emulator does not notice a missing one.) This
holds within a block. In kernels with such atomics, accesses of different blocks are not compared at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..machine.machine_state import Machine
from ..ptx.dtypes import Array

MOST = 1024  # (warp, address) pairs in one step; beyond it all warps are taken to learn everything


class AtomicOrder:
    """For each cluster and each address that atomics update: what the updating warps knew."""

    def __init__(self, machine: Machine) -> None:
        self.clocks = machine.clocks
        self.numbers: dict[tuple[int, int], int] = {}  # (cluster, address): its row in `known`
        self.known = np.zeros((64, machine.clocks.agents), np.int32)
        self.updated: set[tuple[int, int]] = set()  # (agent, address)

    def update(self, addresses: Array, lanes: Array) -> None:
        """Let lanes update these addresses one after another."""
        clocks = self.clocks
        agents = clocks.agents_of_lanes[lanes]
        pairs = np.unique(np.stack([agents, addresses]), axis=1)  # by warp, then address
        agents, addresses = pairs[0], pairs[1]
        if agents.size > MOST:
            clusters = np.unique(agents // clocks.agents)
            clocks.now[clusters] = np.maximum(
                clocks.now[clusters], clocks.now[clusters].max(1, keepdims=True)
            )
        else:
            rows = self._rows(agents // clocks.agents, addresses)
            # All rows at once: the first warp of each, then the second, ...
            order = np.argsort(rows, kind="stable")
            starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
            nth = np.arange(rows.size) - np.repeat(starts, np.diff(starts, append=rows.size))
            for i in range(int(nth.max()) + 1):
                now = order[nth == i]
                clocks.join(agents[now], self.known[rows[now]])
                self.known[rows[now]] = clocks.knows(agents[now][:, None], np.arange(clocks.agents))
        clocks.tick(np.unique(agents))
        self.updated.update(zip(agents.tolist(), addresses.tolist(), strict=True))

    def has_updated(self, addresses: Array, lanes: Array) -> bool:
        """Return whether each lane's warp has updated its address before: a store may release a lock."""
        agents = self.clocks.agents_of_lanes[lanes]
        return all(pair in self.updated for pair in zip(agents.tolist(), addresses.tolist(), strict=True))

    def _rows(self, clusters: Array, addresses: Array) -> NDArray[np.intp]:
        numbers = self.numbers
        found = [
            numbers.setdefault(key, len(numbers))
            for key in zip(clusters.tolist(), addresses.tolist(), strict=True)
        ]
        while len(numbers) > len(self.known):
            self.known = np.concatenate([self.known, np.zeros_like(self.known)])
        return np.array(found, np.intp)
