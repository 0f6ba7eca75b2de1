"""Links last as long as their formula says, by a clock for each rank; rounds are counted from their order."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import minidist as md
from checks import slow_link
from checks.slow_link import Link
from checks.support.rounds import rounds_of
from minidist import comm
from tests.helpers.clocks import Clock


def test_a_chain_takes_a_round_for_each_rank_and_a_ring_takes_one() -> None:
    ring = [[("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)] for rank in range(4)]
    chain = [ring[0], *[own[::-1] for own in ring[1:]]]
    even_first = [own[:: 1 - 2 * (rank % 2)] for rank, own in enumerate(ring)]
    assert [rounds_of(each) for each in (ring, chain, even_first, [[], []])] == [1, 4, 2, 0]


def there_and_back() -> float:
    x, other, clock = torch.ones(250_000), 1 - md.rank(), Clock()
    with mock.patch.object(slow_link, "time", clock), Link(alpha=0.05, beta=100e-9):  # 0.15 s for 1 MB
        work = comm.send(x, other, async_op=True)  # both at the same time
        comm.recv(torch.empty_like(x), other)
        work.wait()
        comm.all_reduce(x)  # two messages of half of it: 0.2 s
    assert x.sum() == 500_000
    return clock.now


def to_and_fro_on_a_busy_machine() -> float:
    """Ten messages of 40 ms, one after the other, by ranks that wake 30 ms too late from each sleep."""
    x, other, clock = torch.ones(1), 1 - md.rank(), Clock()
    sleep = clock.sleep
    clock.sleep = lambda seconds: sleep(seconds + 0.03)
    with mock.patch.object(slow_link, "time", clock), Link(alpha=0.04, beta=0):
        for turn in range(10):
            (comm.send if turn % 2 == md.rank() else comm.recv)(x, other)
    return clock.now


def test_messages_last_as_long_as_their_links_say() -> None:
    plain = comm.send, comm.recv, comm.all_reduce
    with md.Cluster(2) as pair:
        assert pair.run(there_and_back) == [pytest.approx(0.35)] * 2
        # The last delay; delays that add up make it 0.7.
        assert pair.run(to_and_fro_on_a_busy_machine) == [pytest.approx(0.43)] * 2
    assert plain == (comm.send, comm.recv, comm.all_reduce)
