"""Ranks that may fail: their errors replace their results, and the other ranks go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

import minidist as md
from minidist import comm
from tests.helpers.clocks import HANG
from tests.helpers.refusals import refuses


@pytest.fixture(scope="module")
def cluster() -> Iterator[md.Cluster]:
    with md.Cluster(3, timeout=HANG, may_fail=(1, 2)) as cluster:
        yield cluster


def test_a_killed_ranks_place_holds_its_error_and_the_others_go_on(cluster: md.Cluster) -> None:
    before = cluster.run(os.getpid)

    def work() -> float:
        if md.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)  # until after the death
        x = torch.full((1,), float(md.rank()))
        if md.rank() == 0:
            comm.recv(x, source=2)
        else:
            comm.send(x, destination=0)
        return float(x)

    first, error, last = cluster.run(work)
    assert (first, last) == (2.0, 2.0)
    assert isinstance(error, md.RankDied)
    assert (error.rank, error.signal) == (1, "SIGKILL")
    assert not set(cluster.run(os.getpid)) & set(before), "the next run has fresh processes"
    assert [float(x) for x in cluster.run(lambda: comm.all_reduce(torch.ones(1)))] == [3.0] * 3


def test_a_rank_that_raises_is_stopped_so_that_its_peers_notice(cluster: md.Cluster) -> None:
    def work() -> str:
        if md.rank() == 2:
            raise KeyError("no such weight")
        if md.rank() == 1:
            return "fine"
        with pytest.raises(md.CollectiveError, match="process has ended"):
            comm.recv(torch.zeros(1), source=2)
        return "told"

    first, second, error = cluster.run(work)
    assert (first, second) == ("told", "fine")
    assert type(error) is md.RankError
    assert isinstance(error.__cause__, KeyError)
    assert "no such weight" in error.traceback


def test_every_rank_that_may_fail_can(cluster: md.Cluster) -> None:
    first, *errors = cluster.run(lambda: md.rank() and os._exit(4))
    assert first == 0
    assert [(error.rank, error.exit_code) for error in errors] == [(1, 4), (2, 4)]


def test_a_failure_of_another_rank_stops_all(cluster: md.Cluster) -> None:
    def work() -> None:
        if md.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv(torch.zeros(1), source=0)

    with pytest.raises(md.RankDied, match="rank 0 was killed by SIGKILL"):
        cluster.run(work)
    with pytest.raises(md.RankError, match="rank 0 raised ValueError: wrong"):
        cluster.run(lambda: exec("raise ValueError('wrong')") if md.rank() == 0 else time.sleep(HANG))


def test_launch_takes_it_too() -> None:
    first, error = md.launch(lambda: md.rank() and os._exit(3), 2, may_fail=[1])
    assert first == 0
    assert isinstance(error, md.RankDied)


test_wrong_ranks = refuses(
    lambda may_fail: md.Cluster(3, may_fail=may_fail),
    ((1, 3), r"may_fail is \(1, 3\); the ranks are 0 to 2"),
    ((-1,), r"may_fail is \(-1,\)"),
    (1, TypeError, r"may_fail is 1; give ranks, such as \(1, 2\)"),
    ("12", TypeError, "may_fail is"),
)


def test_checked_calls_need_every_rank() -> None:
    with pytest.raises(ValueError, match=r"may_fail names ranks \[1\], which may make none; give one of"):
        md.Cluster(2, check=True, may_fail=[1])
