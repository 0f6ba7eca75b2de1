"""Measure alpha, beta and gamma between the ranks that run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from minidist.comm import routes
from minidist.comm.algorithms.execute import execute
from minidist.comm.algorithms.steps import Message, Step
from minidist.comm.collectives import all_reduce, broadcast
from minidist.comm.cost_profiles import Link, Memory, Profile
from minidist.comm.messages import barrier
from minidist.comm.shared_memory import STAGE
from minidist.comm.work import Group, rank_in, ranks_of

SMALL, LARGE = 2**10, 2**22
"""Bytes of the messages whose times give alpha and beta."""
WHOLE = 2**24
"""Bytes of a tensor that goes through the staging buffers, and does not stay in the cache."""


def fit(group: Group = None, rounds: int = 9) -> Profile:
    """Measure the links between a group's ranks and the memory that they share. All of them call it.

    Takes about a second. What is measured are messages, meetings, copies and sums, none of the collectives
    that `predict` is asked about; but of torch's own algorithms, which can't be taken apart, two all-reduces.

    Args:
        group: the ranks; at least 2.
        rounds: times that each is measured; the median counts.

    Returns:
        The same on all ranks: a profile named "loopback" where they share a host, else "measured".

    Raises:
        ValueError: a group of one rank.
        CollectiveError: a peer is gone or late.
    """
    ranks, rank = len(ranks_of(group)), rank_in(group)
    if ranks == 1:
        raise ValueError("fit measures links between ranks, and the group has one; call it in at least two")
    memory = routes.route(group).memory
    small, large = torch.zeros(SMALL // 4), torch.zeros(LARGE // 4)

    def seconds(run: Callable[[], object], calls: int = 1) -> float:
        """Median over rounds of the slowest rank's time for one call."""
        times = []
        for _ in range(rounds + 1):
            barrier(group)
            begun = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - begun) / calls)
        median = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
        return float(all_reduce(median, "max", algorithm="torch", group=group))

    def back_and_forth(x: torch.Tensor, times: int) -> float:
        """Seconds of a message between ranks 0 and 1, while the others wait."""
        there, back = Message(1, 0, len(x)), Message(0, 0, len(x))
        mine = {
            0: [Step(sends=(there,)), Step(receives=(there,))],
            1: [Step(receives=(back,)), Step(sends=(back,))],
        }
        steps = mine.get(rank, []) * times
        return seconds(lambda: execute(steps, x, x, group=group)) / (2 * times)

    def around(x: torch.Tensor) -> float:
        """Seconds of a message where every rank sends one to the next."""
        received = torch.empty_like(x)
        step = Step((Message((rank + 1) % ranks, 0, len(x)),), (Message((rank - 1) % ranks, 0, len(x)),))
        return seconds(lambda: execute([step], x, received, group=group))

    alpha = back_and_forth(small, 10)
    beta = max(0.0, back_and_forth(large, 1) - alpha) / LARGE
    call = max(0.0, seconds(lambda: broadcast(small, algorithm="tree", group=group), 10) - alpha)
    lanes = max(1.0, ranks * (alpha + beta * LARGE) / around(large))
    torch_small = seconds(lambda: all_reduce(small, algorithm="torch", group=group), 10)
    torch_large = seconds(lambda: all_reduce(large, algorithm="torch", group=group))
    torch_sent = max(2 * (ranks - 1) / ranks, 2 * (ranks - 1) / lanes) * (LARGE - SMALL)
    torch_rounds = max(2 * (ranks - 1), 2 * ranks * (ranks - 1) / lanes)
    gamma = seconds(lambda: large[: STAGE // 4].add_(large[-STAGE // 4 :]), 4) / STAGE

    shared = None
    if memory is not None and len(memory.hosts) == 1:
        meet = seconds(lambda: barrier(group), 50)
        part, whole = torch.empty(STAGE // 4), torch.zeros(WHOLE // 4)

        def copy_through() -> None:
            for start in range(0, len(whole), len(part)):
                part.copy_(whole[start : start + len(part)])

        copy = seconds(copy_through) / WHOLE
        shared = Memory(meet, copy, gamma)
    return Profile(
        "loopback" if shared else "measured",
        f"measured between {ranks} ranks",
        {
            "messages": Link(alpha, beta, call),
            "torch": Link(torch_small / torch_rounds, max(0.0, torch_large - torch_small) / torch_sent),
        },
        gamma,
        lanes,
        shared,
        ranks,
    )
