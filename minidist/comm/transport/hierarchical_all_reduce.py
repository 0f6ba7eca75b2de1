"""All-reduce over several hosts: shared memory inside each, a ring of messages between them.

The phases are those of `algorithms/hierarchical.py`. There are as many parts as the smallest host has ranks,
so that every ring passes through every host. With m hosts the network carries 2 (m - 1) / m S for each host,
however many ranks it has.

Source: Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision", section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minidist.comm.algorithms.execute import execute
from minidist.comm.algorithms.ring import all_gather_among, reduce_scatter_among
from minidist.comm.algorithms.steps import Step, bytes_sent, offsets
from minidist.comm.transport import shared_collectives
from minidist.comm.transport.shared_memory import SharedMemory


def hierarchical_all_reduce(
    memory: SharedMemory, x: torch.Tensor, op: str
) -> tuple[Callable[[], None], int, int]:
    """Plan an all-reduce of x, flat and in place.

    Returns the function that runs it, the bytes that other ranks get from this one, and how many of these go
    through sockets.
    """
    group = memory.group
    own, members, lanes = memory.own, len(memory.members), min(map(len, memory.hosts))
    bounds = [*offsets(len(x), lanes), *[len(x)] * (members - lanes)]  # further ranks have an empty part
    part = x[bounds[own] : bounds[own + 1]]
    steps: list[Step] = []
    if own < lanes:
        ring, here = [host[own] for host in memory.hosts], memory.hosts.index(memory.members)
        within = offsets(len(part), len(ring))
        steps = [*reduce_scatter_among(ring, here, within), *all_gather_among(ring, here, within)]

    def run() -> None:
        combine = "sum" if op == "mean" else op
        if members > 1:
            shared_collectives.reduce_scatter(memory, x, part, combine, bounds)
        with memory.call():
            execute(steps, part, part, combine, group)
        if op == "mean":
            part.div_(sum(map(len, memory.hosts)))
        if members > 1:
            shared_collectives.all_gather(memory, part, x, bounds)

    inside = (len(x) - len(part)) + (members - 1) * len(part)
    on_wire = bytes_sent(steps, x.element_size())
    return run, inside * x.element_size() + on_wire, on_wire
