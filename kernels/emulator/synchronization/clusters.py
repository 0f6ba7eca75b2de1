"""Clusters: blocks that run together, access each other's shared memory, and wait for each other.

PTX ISA, "mapa", "barrier.cluster". An address of another block's shared memory holds 1 + the
block's rank in the cluster above its offset (`CLUSTER_SHIFT`); 0 there means the thread's own block.
"""

from __future__ import annotations

import numpy as np

from ..base.addresses import CLUSTER_SHIFT, SHARED_WINDOW, groups, lanes_of
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit, unit_of_lanes
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.program import Address, PtxInstruction
from .async_groups import snapshot
from .block_barriers import MISSED

OFFSETS = (1 << CLUSTER_SHIFT) - 1


@unit("mapa", order="pure")
def mapa(batch: Batch) -> Run:
    """mapa{.shared::cluster}.type d, a, b: the address in block b of the cluster for a in the own one."""
    kind = batch.first.opcode[-1]
    rank, write = batch.source(2, "u32"), batch.target(0, kind)
    # PTX may put a variable of shared memory in brackets here.
    at = batch.address(1) if isinstance(batch.first.operands[1], Address) else batch.source(1, kind)

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        ranks = np.broadcast_to(rank(machine), (len(batch), machine.lanes)).astype(np.int64)
        if (bad := ranks[:, lanes] >= machine.cluster).any():
            lane = int(lanes[np.argmax(bad.any(axis=0))])
            text = f"maps an address to rank {int(ranks[:, lanes][bad][0])} of a cluster of {machine.cluster}"
            machine.fault_at("out of bounds", text, lane)
        addresses = np.broadcast_to(at(machine), ranks.shape).astype(np.int64)
        window = addresses & ~(SHARED_WINDOW - 1)
        mapped = window | (ranks + 1) << CLUSTER_SHIFT | addresses & OFFSETS
        write(machine, mapped.astype(f"u{8 if kind.endswith('64') else 4}"), mask)

    return run


class RemoteAccesses:
    """Accesses to other blocks' shared memory. No block may end before it knows that they are done."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        # By (block, agent): the time and the instruction of the last access.
        self.last: dict[tuple[int, int], tuple[int, PtxInstruction | None]] = {}

    def note(self, block: int, agents: Array) -> None:
        """Note that agents use the memory of `block` now; agents of the block itself do not count."""
        clocks, machine = self.machine.clocks, self.machine
        for agent in np.unique(agents):
            if machine.cluster > 1 and agent // (clocks.warps + clocks.asynchronous) != block:
                self.last[block, int(agent)] = (int(clocks.own(agent[None])[0]), machine.instruction)

    def finish(self) -> None:
        """At the end of the kernel, Fault for an access that the block's threads did not know of."""
        machine, clocks = self.machine, self.machine.clocks
        for (block, agent), (time, instruction) in self.last.items():
            lanes = block * machine.lanes_per_block + np.arange(clocks.warps) * 32
            warps = clocks.agents_of_lanes[lanes]
            known = clocks.knows(warps, np.array([agent % clocks.agents]))
            if int(known.max()) < time:
                machine.instruction = instruction
                machine.fault(
                    "block ended",
                    f"{machine.block_name(block)} may have ended when another block of its cluster uses "
                    "its shared memory: let both come to barrier.cluster at the end",
                )


class ClusterBarriers:
    """The barrier of each cluster: how often each thread has arrived and has waited."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arrived = np.zeros(machine.lanes, np.int64)
        self.waited = np.zeros(machine.lanes, np.int64)
        self.released: dict[tuple[int, int], Array] = {}  # (cluster, phase): what the arrivals knew

    def clusters(self, lanes: Array) -> Array:
        """Return the cluster of each lane, numbered over the machine."""
        return self.machine.block_of_lane[lanes] // self.machine.cluster

    def arrive(self, lanes: Array, releases: bool) -> None:
        """Let lanes arrive, and release what they did."""
        machine, clocks = self.machine, self.machine.clocks
        if (bad := self.arrived[lanes] != self.waited[lanes]).any():
            text = "comes to the cluster's barrier again before it has waited there"
            machine.fault_at("barrier", text, int(lanes[np.argmax(bad)]))
        self.arrived[lanes] += 1
        machine.events += 1
        agents = clocks.agents_of_lanes[lanes]
        if releases:
            for key, which in groups(self.clusters(lanes), self.arrived[lanes]):
                clock = snapshot(clocks, np.unique(agents[which])).max(axis=0)
                self.released[key] = np.maximum(self.released.get(key, clock), clock)
        clocks.tick(np.unique(agents))

    def wait(self, lanes: Array) -> Lanes:
        """Return which lanes may go on: those whose whole cluster, except ended threads, has arrived."""
        machine, clocks = self.machine, self.machine.clocks
        if (bad := self.arrived[lanes] == self.waited[lanes]).any():
            text = "waits at the cluster's barrier to which it did not come (barrier.cluster.arrive)"
            machine.fault_at("barrier", text, int(lanes[np.argmax(bad)]))
        come = np.where(machine.alive, self.arrived, np.iinfo(np.int64).max)
        fewest = come.reshape(-1, machine.cluster * machine.lanes_per_block).min(axis=1)
        clusters = self.clusters(lanes)
        passed: Lanes = fewest[clusters] >= self.arrived[lanes]
        self.waited[lanes[passed]] += 1
        agents = clocks.agents_of_lanes[lanes]
        for key, which in groups(clusters[passed], self.arrived[lanes[passed]]):
            if key in self.released:
                clocks.join(np.unique(agents[passed][which]), self.released[key])
        return passed


@unit_of_lanes("barrier.cluster.arrive", order="barrier", counted="barrier")
def arrive(machine: Machine, lanes: Array) -> None:
    """barrier.cluster.arrive{.release|.relaxed}{.aligned}: arrive, and go on; .relaxed shows nothing."""
    assert machine.instruction is not None
    machine.state(ClusterBarriers).arrive(lanes, releases="relaxed" not in machine.instruction.opcode)


@unit_of_lanes("barrier.cluster.wait", order="barrier", counted="barrier", missed=MISSED)
def wait(machine: Machine, lanes: Array) -> Lanes:
    """barrier.cluster.wait{.acquire}{.aligned}: wait until all threads of the cluster have arrived."""
    return machine.state(ClusterBarriers).wait(lanes)
