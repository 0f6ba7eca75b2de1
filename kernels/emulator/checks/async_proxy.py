"""The asynchronous proxy: another way to shared memory, that of the copy engine and of wgmma.

What a thread stores (st.shared, stmatrix) is seen there only after a fence.proxy.async, which has to lie
between the store and the operation that reads, in the storing thread or in one that was synchronised with it
since (PTX ISA, "Async Proxy", and "Memory Consistency Model: Proxy-preserved Base Causality Order"). On a GPU
a missing one shows rarely. Here it is a fault: each fence remembers what its warp knew then, and a reader may
see a store only where it knows of a fence that knew of it.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from ..base.addresses import lanes_of, of_lanes
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..ptx.dtypes import Array, Mask
from ..synchronization.async_groups import snapshot
from ..synchronization.mbarriers import Mbarriers


class Proxies:
    """The fences of each warp: when, and what it knew."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.times: dict[int, list[int]] = {}  # by agent, numbered over the machine
        self.known: dict[int, list[Array]] = {}

    def fence(self, agents: Array) -> None:
        """Note a fence by these warps."""
        clocks = self.machine.clocks
        for agent, clock, time in zip(agents, snapshot(clocks, agents), clocks.own(agents), strict=True):
            self.times.setdefault(int(agent), []).append(int(time))
            self.known.setdefault(int(agent), []).append(clock)
        clocks.tick(agents)

    def hidden(self, granules: Array, reader: int, clock: Array) -> NDArray[np.bool_]:
        """Return which granules were stored last by a thread, with no fence that `clock` knows of.

        `clock` is a vector clock of the reader, an agent numbered over the machine.
        """
        clocks = self.machine.clocks
        writer, written = clocks.writer[granules], clocks.written[granules]
        stored: NDArray[np.bool_] = (written > 0) & (
            writer % (clocks.warps + clocks.asynchronous) < clocks.warps
        )
        if not stored.any():
            return stored
        first = reader // clocks.agents * clocks.agents
        fenced = np.zeros(clocks.agents, np.int64)
        for agent in np.flatnonzero(clock):
            # The last fence of that agent that the reader knows of.
            before = bisect.bisect_right(self.times.get(first + int(agent), []), int(clock[agent]))
            if before:
                fenced = np.maximum(fenced, self.known[first + int(agent)][before - 1])
        return stored & (written > fenced[writer])


class TensorMapFences:
    """The tensor maps that blocks have acquired: which warps did, and when first."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.times: dict[tuple[int, int], dict[int, int]] = {}  # (block, address): agent: time

    def acquire(self, addresses: Array, lanes: Array) -> None:
        """Note fences for the maps at these addresses, by these lanes."""
        clocks = self.machine.clocks
        agents = clocks.agents_of_lanes()[lanes]
        for lane, address, agent, time in zip(lanes, addresses, agents, clocks.own(agents), strict=True):
            block = int(self.machine.block_of_lane[lane])
            self.times.setdefault((block, int(address)), {}).setdefault(int(agent), int(time))

    def acquired(self, address: int, lane: int) -> bool:
        """Return whether a lane knows that its block has acquired the map at this address."""
        clocks = self.machine.clocks
        fences = self.times.get((int(self.machine.block_of_lane[lane]), address))
        if not fences:
            return False
        agents = np.array(list(fences))
        own = clocks.agents_of_lanes()[[lane]]
        return bool((clocks.knows(own, agents % clocks.agents) >= list(fences.values())).any())


@unit("fence.proxy.tensormap::generic", order="fence", results=0)
def fence_proxy_tensormap(batch: Batch) -> Run:
    """fence.proxy.tensormap::generic.acquire.scope [addr], 128: see a tensor map as it was written.

    The other half, .release, is for maps that a kernel changes, which the emulator does not have.
    """
    if "acquire" not in batch.first.opcode:
        return lambda machine, mask: None
    address = batch.address(0)

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        machine.state(TensorMapFences).acquire(of_lanes(address(machine), machine, lanes), lanes)

    return run


@unit("fence.proxy.async", order="fence", results=0)
def fence_proxy_async(batch: Batch) -> Run:
    """fence.proxy.async{.space}: show what was stored to the asynchronous proxy."""

    def run(machine: Machine, mask: Mask) -> None:
        agents = np.unique(machine.clocks.agents_of_lanes()[lanes_of(machine, mask)])
        machine.state(Proxies).fence(agents)
        machine.state(Mbarriers).show(agents)

    return run


@unit("fence.mbarrier_init", order="fence", results=0)
def fence_mbarrier_init(batch: Batch) -> Run:
    """fence.mbarrier_init.release.cluster: show the mbarriers that this thread made to the copy engine."""

    def run(machine: Machine, mask: Mask) -> None:
        machine.state(Mbarriers).show(np.unique(machine.clocks.agents_of_lanes()[lanes_of(machine, mask)]))

    return run
