"""All-reduce over several hosts: shared memory inside each, a ring of messages between them.

First the ranks of each host reduce-scatter the tensor through shared memory, so that rank l of a host has
part l. Then the ranks with the same part, one on each host, all-reduce it around a ring. Then each host's
ranks all-gather the parts. There are as many parts as the smallest host has ranks, so that every ring passes
through every host. With m hosts the network carries 2 (m - 1) / m S for each host, however many ranks it has.

Source: Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision", section 3.3.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minidist.comm.transport import shared_collectives
from minidist.comm.transport.shared_memory import SharedMemory


class Hierarchy:
    """One hierarchical all-reduce of x, flat and in place."""

    def __init__(self, memory: SharedMemory, x: torch.Tensor, op: str) -> None:
        from minidist.comm.algorithms import Step, bytes_sent, offsets, ring_all_reduce

        self.memory, self.x, self.op = memory, x, op
        members, lanes = len(memory.members), min(map(len, memory.hosts))
        # Further ranks have an empty part.
        self.offsets = [*offsets(len(x), lanes), *[len(x)] * (members - lanes)]
        self.part = x[self.offsets[memory.own] : self.offsets[memory.own + 1]]
        self.steps: list[Step] = []
        if memory.own < lanes:
            ring = [host[memory.own] for host in memory.hosts]
            here = memory.hosts.index(memory.members)
            for step in ring_all_reduce(here, len(ring), len(self.part)):
                sends = tuple(replace(message, peer=ring[message.peer]) for message in step.sends)
                receives = tuple(replace(message, peer=ring[message.peer]) for message in step.receives)
                self.steps.append(Step(sends, receives))
        self._on_wire = bytes_sent(self.steps, x.element_size())

    def bytes_sent(self) -> tuple[int, int]:
        """Return the bytes that other ranks get from this one, and how many of these go through sockets."""
        size, members = self.x.element_size(), len(self.memory.members)
        inside = (len(self.x) - len(self.part)) + (members - 1) * len(self.part)
        return size * inside + self._on_wire, self._on_wire

    def run(self) -> None:
        """Reduce-scatter on each host, all-reduce around the rings, all-gather on each host."""
        from minidist.comm.algorithms.execute import execute

        memory, x, op = self.memory, self.x, "sum" if self.op == "mean" else self.op
        if len(memory.members) > 1:
            shared_collectives.reduce_scatter(memory, x, self.part, op, self.offsets)
        execute(self.steps, self.part, self.part, op, memory.group)
        if self.op == "mean":
            self.part.div_(sum(map(len, memory.hosts)))
        if len(memory.members) > 1:
            shared_collectives.all_gather(memory, self.part, x, self.offsets)
