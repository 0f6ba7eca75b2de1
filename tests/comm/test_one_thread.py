"""Two threads of a rank in the collectives of one group are an error, and never a wrong number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

import minidist as md
from minidist import comm
from minidist.comm import work
from tests.helpers.clocks import HANG

Clusters = Callable[[int], md.Cluster]


def in_two_threads(group: work.Group, other: work.Group) -> tuple[list[str], list[float]]:
    """The errors of two threads, one inside a call of `group` while one makes a call of `other`; and sums."""
    inside, errors, sums = threading.Barrier(2, timeout=HANG), list[str](), list[float]()
    reduced = partial(comm.all_reduce, algorithm="torch")

    def first() -> None:
        def start(at_once: bool) -> None:
            inside.wait()
            inside.wait()

        x = torch.ones(3)
        work.run("all_reduce", x, group, work.CallPlan("torch", start, 0, 0), lambda: x, False)

    def second() -> None:
        inside.wait()
        try:
            sums.append(float(reduced(torch.ones(()), group=other)))
        finally:
            inside.wait()

    def caught(act: Callable[[], None]) -> None:
        try:
            act()
        except md.CollectiveError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=caught, args=(act,)) for act in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums.append(float(reduced(torch.ones(()), group=group)))  # the group is free again
    return errors, sums


def test_two_threads_in_one_group_both_get_an_error() -> None:
    with md.Cluster(2, timeout=HANG) as cluster:  # of its own: the error leaves ranks out of step
        found = cluster.run(in_two_threads, None, None)
    for errors, sums in found:
        assert len(errors) == 2
        for text in errors:
            assert "two threads of this rank are in collectives of one group at once, all_reduce of" in text
        assert sums == [2.0]


def test_threads_may_have_a_group_each(cluster_of: Clusters) -> None:
    def run() -> tuple[list[str], list[float]]:
        mesh = comm.Mesh(dp=2)
        return in_two_threads(mesh.group("dp"), mesh.duplicate("dp"))

    for errors, sums in cluster_of(2).run(run):
        assert errors == []
        assert sums == [2.0, 2.0]


def test_a_call_under_way_does_not_count(cluster_of: Clusters) -> None:
    def overlapped() -> float:
        comm.barrier()
        works = [comm.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
        total = comm.all_reduce(torch.ones(()))
        return float(total) + sum(float(work.wait()[0]) for work in works)

    assert cluster_of(2).run(overlapped) == [42.0, 42.0]
