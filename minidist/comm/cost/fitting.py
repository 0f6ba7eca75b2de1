"""`fit`: measure alpha, beta and gamma between the ranks that run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from minidist.comm.algorithms.execute import execute
from minidist.comm.algorithms.steps import Message, Step
from minidist.comm.collectives import all_reduce, barrier
from minidist.comm.cost.links import Link, LinkProfile, SharedMemoryCost
from minidist.comm.transport import STAGE
from minidist.comm.transport.shared_memory import SharedMemory, group_memory
from minidist.comm.work import Group, rank_in, ranks_of

SMALL, LARGE = 2**10, 2**22
"""Bytes of the messages whose times give alpha and beta."""
WHOLE = 2**24
"""Bytes of a tensor that goes through the staging buffers and exceeds the cache."""


def fit(group: Group = None, rounds: int = 15) -> LinkProfile:
    """Measure the links between a group's ranks and the memory that they share. All of them call it.

    Takes a second or two. It measures messages, barriers, copies and sums, none of the collectives that
    `predict` is asked about. The exception is torch's all-reduce, which can't be taken apart: two of them are
    measured.

    Args:
        group: the ranks; at least 2.
        rounds: repetitions of each measurement; the median counts.

    Returns:
        A profile, the same on all ranks, named "loopback" if they share a host and "measured" otherwise.

    Raises:
        ValueError: the group has one rank.
        CollectiveError: a peer is gone or late.
    """
    ranks, rank = len(ranks_of(group)), rank_in(group)
    if ranks == 1:
        raise ValueError("fit measures links between ranks, and the group has one; call it in at least two")
    memory = group_memory(group).memory
    small, large = torch.zeros(SMALL // 4), torch.zeros(2 * LARGE // 4)

    def seconds(run: Callable[[], object], calls: int = 1) -> float:
        """Return the time of one call: each rank's median over the rounds, and of those the slowest."""
        times = []
        for _ in range(rounds + 1):
            barrier(group)
            begun = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - begun) / calls)
        median = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
        return float(all_reduce(median, "max", algorithm="torch", group=group))

    def back_and_forth(size: int, times: int) -> float:
        """Return the seconds of a message between ranks 0 and 1, while the others wait."""
        # Every message has its own slot: a slot that is being sent must not be overwritten.
        x, n = torch.zeros((2 * times + 1) * size // 4), size // 4
        steps = []
        for i in range(2 * times):
            if rank == i % 2:
                steps.append(Step(sends=(Message(1 - rank, i * n, (i + 1) * n),)))
            elif rank == 1 - i % 2:
                steps.append(Step(receives=(Message(1 - rank, (i + 1) * n, (i + 2) * n),)))
        return seconds(lambda: execute(steps, x, x, group=group)) / (2 * times)

    def around(size: int, times: int) -> float:
        """Return the seconds of a message when every rank passes on to the next what the last one sent."""
        x, n = torch.zeros((times + 1) * size // 4), size // 4
        steps = [
            Step(
                sends=(Message((rank + 1) % ranks, i * n, (i + 1) * n),),
                receives=(Message((rank - 1) % ranks, (i + 1) * n, (i + 2) * n),),
            )
            for i in range(times)
        ]
        return seconds(lambda: execute(steps, x, x, group=group)) / times

    alpha, busy_alpha = back_and_forth(SMALL, 10), around(SMALL, 10)
    beta = max(0.0, back_and_forth(LARGE, 1) - alpha) / LARGE
    busy_beta = max(0.0, around(LARGE, 2) - busy_alpha) / LARGE
    shared = _memory(memory, seconds, group) if memory is not None and len(memory.hosts) == 1 else None
    call = shared.call if shared is not None else 0.0
    torch_small = seconds(lambda: all_reduce(small, algorithm="torch", group=group), 10)
    torch_large = seconds(lambda: all_reduce(large, algorithm="torch", group=group))
    torch_alpha = max(0.0, torch_small - call) / (2 * (ranks - 1))
    torch_beta = max(0.0, torch_large - torch_small) / (2 * (ranks - 1) / ranks * (2 * LARGE - SMALL))
    part = torch.zeros(STAGE // 4)
    gamma = seconds(lambda: part.add_(large[: len(part)]), 4) / STAGE
    return LinkProfile(
        "loopback" if shared else "measured",
        f"measured between {ranks} ranks",
        {
            "messages": Link(alpha, beta, busy_alpha, busy_beta, call),
            "torch": Link(torch_alpha, torch_beta, call=call),
        },
        gamma,
        shared,
        ranks,
    )


def _memory(memory: SharedMemory, seconds: Callable[..., float], group: Group) -> SharedMemoryCost:
    """Measure staging buffers: every rank fills its own, then uses its neighbour's."""
    buffer, whole = memory.next_buffer(torch.float32), torch.zeros(WHOLE // 4)
    own, other = buffer[memory.own], buffer[(memory.own + 1) % len(memory.members)]
    chunks = [whole[start : start + len(own)] for start in range(0, len(whole), len(own))]

    def filled(use: Callable[[torch.Tensor], object] | None = None) -> float:
        """Return the seconds to put every chunk into the buffer, and to use it between two barriers."""

        def run() -> None:
            for chunk in chunks:
                own.copy_(chunk)
                if use is not None:
                    memory.barrier()
                    use(chunk)
                    memory.barrier()

        return seconds(run)

    meet, copied = seconds(memory.barrier, 50), filled()
    before = copied + 2 * len(chunks) * meet
    taken = filled(lambda chunk: chunk.copy_(other)) - before
    combined = filled(lambda chunk: torch.add(own, other, out=own)) - before
    put_s, take, combine = (max(0.0, value) / WHOLE for value in (copied, taken, combined))
    least = seconds(lambda: all_reduce(whole[:1], algorithm="shared_memory", group=group), 20)
    return SharedMemoryCost(meet, put_s, take, combine, call=max(0.0, least - 2 * meet))
