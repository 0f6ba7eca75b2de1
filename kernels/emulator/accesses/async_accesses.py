"""Checks of what the copy engine and wgmma do with shared memory: missing data and missing fences.

Both access shared memory through the asynchronous proxy. They see what a thread stored (st.shared, stmatrix)
only after a fence.proxy.async. The fence lies between the store and the operation that reads, in the storing
thread or in one that has synchronised with it since (PTX ISA, "Async Proxy", and "Memory Consistency Model:
Proxy-preserved Base Causality Order"). A GPU rarely shows that one is missing. Here each fence remembers what
its warp knew, and a reader may see a store only if it knows of a fence that knew of the store.
"""

from __future__ import annotations

import bisect

import numpy as np

from ..base.instruction_registry import unit_of_lanes
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes
from ..synchronization.async_groups import snapshot
from ..synchronization.mbarriers import Mbarriers
from . import race_faults as races


class Proxies:
    """The fences of each warp: when it fenced, and what it knew then."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.times: dict[int, list[int]] = {}  # by agent, numbered over the machine
        self.known: dict[int, list[Array]] = {}

    def fence(self, agents: Array) -> None:
        """Note a fence.proxy.async by these warps."""
        clocks = self.machine.clocks
        for agent, clock, time in zip(agents, snapshot(clocks, agents), clocks.own(agents), strict=True):
            self.times.setdefault(int(agent), []).append(int(time))
            self.known.setdefault(int(agent), []).append(clock)
        clocks.tick(agents)

    def hidden(self, granules: Array, reader: int, clock: Array) -> Lanes:
        """Return which granules were last stored with no fence that agent `reader`, at `clock`, knows of."""
        clocks = self.machine.clocks
        writer, written = clocks.writer[granules], clocks.written[granules]
        stored: Lanes = (written > 0) & (writer % (clocks.warps + clocks.asynchronous) < clocks.warps)
        if not stored.any():
            return stored
        first = reader // clocks.agents * clocks.agents
        fenced = np.zeros(clocks.agents, np.int64)
        for agent in np.flatnonzero(clock):
            # The agent's last fence that the reader knows of.
            before = bisect.bisect_right(self.times.get(first + int(agent), []), int(clock[agent]))
            if before:
                fenced = np.maximum(fenced, self.known[first + int(agent)][before - 1])
        return stored & (written > fenced[writer])


class TensorMapFences:
    """The tensor maps that blocks have acquired: which warps did so, and when first."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.times: dict[tuple[int, int], dict[int, int]] = {}  # (block, address): agent: time

    def acquire(self, addresses: Array, lanes: Array) -> None:
        """Note that these lanes acquire the maps at these addresses."""
        clocks = self.machine.clocks
        agents = clocks.agents_of_lanes[lanes]
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
        own = clocks.agents_of_lanes[[lane]]
        return bool((clocks.knows(own, agents % clocks.agents) >= list(fences.values())).any())


def read_by_engine(
    machine: Machine, granules: Array, agents: Array, known: Array, what: str, lanes: list[int]
) -> None:
    """Note what asynchronous agents (n,) read, granules (n, m); agent i knows known[i], and lane i began it.

    Fault for data that nobody wrote or that a copy still fills, for a race, and for data that a thread stored
    last if the reader knows of no fence since.
    """
    clocks = machine.clocks
    for row, lane in zip(granules, lanes, strict=True):
        if (clocks.written[row] == 0).any():
            machine.fault_at("unwritten shared memory", f"lets {what} shared memory that nobody wrote", lane)
        if clocks.any_pending and clocks.pending[row].any():
            text = f"lets {what} shared memory that an asynchronous copy still fills"
            machine.fault_at("async copy read before it was waited for", text, lane)
    found = clocks.read(granules, agents)
    races.of_engine(machine, found, granules, agents, what, lanes[int(np.argmax(found.any(axis=1)))])
    for row, agent, clock, lane in zip(granules, agents.tolist(), known, lanes, strict=True):
        if machine.state(Proxies).hidden(row, agent, clock).any():
            text = f"lets {what} what a thread stored, with no fence.proxy.async in between"
            machine.fault_at("missing fence", text, lane)
    clocks.tick(agents)


@unit_of_lanes(
    "fence.proxy.tensormap::generic.acquire", order="fence", operands=("address",), counted="barrier"
)
def fence_proxy_tensormap(machine: Machine, lanes: Array, addresses: Array) -> None:
    """fence.proxy.tensormap::generic.acquire.scope [addr], 128: see a tensor map as the host wrote it.

    .release, for maps that a kernel changes, has no effect: the emulator does not support such maps.
    """
    machine.state(TensorMapFences).acquire(addresses, lanes)


@unit_of_lanes("fence.proxy.async", order="fence", counted="barrier")
def fence_proxy_async(machine: Machine, lanes: Array) -> None:
    """fence.proxy.async{.space}: show earlier stores to the asynchronous proxy."""
    agents = np.unique(machine.clocks.agents_of_lanes[lanes])
    machine.state(Proxies).fence(agents)
    machine.state(Mbarriers).show(agents)


@unit_of_lanes("fence.mbarrier_init", order="fence", counted="barrier")
def fence_mbarrier_init(machine: Machine, lanes: Array) -> None:
    """fence.mbarrier_init.release.cluster: show the thread's new mbarriers to the copy engine."""
    machine.state(Mbarriers).show(np.unique(machine.clocks.agents_of_lanes[lanes]))
