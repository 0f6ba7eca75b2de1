"""Programs that are measured in turns compute on devices of one kind."""

from __future__ import annotations

import pytest

from minidist.benchmarks.harness.training.peers import plain
from minidist.benchmarks.harness.training.rounds import Job, UnderWay, measure_jobs
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.comm.ledgers import Call
from minidist.kernels.measure.timing_in_turns import LEAST
from tests.conftest import Clusters


class OneGpu:
    """Stands for the ranks of a machine with one GPU: one rank alone computes on it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def run(self, fn: object, *args: object) -> list[str]:
        assert getattr(fn, "__name__", "") == "device_kind", (
            "a program was started before the devices were compared"
        )
        return ["cuda" if self.ranks == 1 else "cpu"] * self.ranks


def test_one_gpu_is_not_compared_with_cpus() -> None:
    work = Work("byte-tiny", 4)
    jobs = {"one": Job(1, work, plain), "two": Job(2, work, plain)}
    with pytest.raises(pytest.skip.Exception, match="1 on cuda, 2 on cpu; each needs a GPU"):
        measure_jobs(OneGpu, jobs, rounds=1)  # type: ignore[arg-type] # a double


def test_ranks_on_one_kind_of_device_are_measured(cluster_of: Clusters) -> None:
    jobs = {"one": Job(1, Work("byte-tiny", 4), plain)}
    assert len(measure_jobs(cluster_of, jobs, rounds=2)["one"].seconds) == 2
    assert len(measure_jobs(cluster_of, jobs, rounds=9, each=0.0)["one"].seconds) == LEAST


def hidden(*calls: tuple[str, float, float, float]) -> float:
    """Of calls: their name, when each began, and when the rank began and ended to wait for it."""
    watcher = UnderWay()
    several = [(Call(name, "ring", "float32", (1,), (0, 1), 4), *times) for name, *times in calls]
    for call, begun, _, _ in several:
        watcher.called(call, begun, begun, at_once=True, complete=False)
    for call, _, waits, ended in several:
        watcher.waited(call, waits, ended, None, None)
    return watcher.hidden


def test_calls_that_wait_for_each_other_hide_nothing() -> None:
    """An all-reduce for each parameter after the backward pass: the ledger's share counts each call alone."""
    queue = [("all_reduce", 0.0, float(i), i + 1.0) for i in range(20)]
    assert hidden(*queue) == pytest.approx(0.0)
    assert 1 - sum(end - waits for _, _, waits, end in queue) / sum(end for *_, end in queue) > 0.9
    assert hidden(("all_reduce", 0.0, 3.0, 4.0)) == pytest.approx(0.75)
    assert hidden(("all_reduce", 0.0, 3.0, 4.0), ("barrier", 0.0, 0.0, 100.0)) == pytest.approx(0.75)
    assert hidden() == 0.0
