"""A rank that has returned from its function is named by those that wait for it, within seconds."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.comm import returned_ranks
from minidist.comm.returned_ranks import ReturnedRanks
from tests.comm.programs import torchrun
from tests.conftest import Clusters
from tests.helpers.clocks import HANG

SECONDS = HANG / 2
"""Below a run's limit."""


def longer_loop(algorithm: str, async_op: bool) -> None:
    """Rank 1's loop ends one call before the others'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(returned_ranks, "SLICE", timedelta(seconds=0.3))
        for _ in range(4 - (md.rank() == 1)):
            work = comm.all_reduce(torch.ones(3), algorithm=algorithm, async_op=async_op)
            if async_op:
                work.wait()


@pytest.mark.parametrize(
    ("ranks", "algorithm", "async_op"),
    [(3, "auto", False), (2, "shared_memory", True), (2, "torch", False)],
)
def test_the_rank_whose_loop_is_shorter_is_named(
    cluster_of: Clusters, ranks: int, algorithm: str, async_op: bool
) -> None:
    cluster_of(ranks).run(md.rank)  # starts them
    begun = time.monotonic()
    with pytest.raises(md.RankError, match=r"all_reduce of .*rank 1 has returned from its function") as error:
        cluster_of(ranks).run(longer_loop, algorithm, async_op)
    assert time.monotonic() - begun < SECONDS
    assert isinstance(error.value.__cause__, md.CollectiveError)


def test_a_message_from_a_rank_that_has_returned_does_not_come(cluster_of: Clusters) -> None:
    def receive() -> None:
        if md.rank() == 0:
            comm.recv(torch.ones(3), source=1)

    cluster_of(2).run(md.rank)
    begun = time.monotonic()
    with pytest.raises(md.RankError, match=r"recv of .*rank 1 has returned from its function"):
        cluster_of(2).run(receive)
    assert time.monotonic() - begun < SECONDS


def test_a_rank_that_is_late_has_not_returned(cluster_of: Clusters) -> None:
    """Also in a second function, and with what a rank sent before it returned."""

    def late(algorithm: str) -> float:
        with pytest.MonkeyPatch.context() as patch:  # the others look for it several times, but sooner
            patch.setattr(returned_ranks, "PAUSE", 0.1)
            patch.setattr(returned_ranks, "SLICE", timedelta(seconds=0.1))
            for rank in range(2):
                time.sleep(0.4 * (md.rank() == rank))
                total = comm.all_reduce(torch.ones(()), algorithm=algorithm)
            if md.rank() == 1:
                comm.send(torch.full((3,), 5.0), destination=0)
                return float(total)
            time.sleep(0.4)
            return float(comm.recv(torch.empty(3), source=1).sum())

    for algorithm in ("auto", "torch"):
        assert cluster_of(2).run(late, algorithm) == [15.0, 2.0]


@pytest.mark.deep
def test_torchrun_ends_when_a_rank_waits_for_one_that_has_returned(tmp_path: Path) -> None:
    program = """
        import torch, minidist as md
        def loop():
            for _ in range(4 - md.rank()):
                md.comm.all_reduce(torch.ones(3))
        md.launch(loop, ranks=2)
    """
    done = torchrun(tmp_path, program)
    assert done.returncode
    assert "rank 1 has returned from its function, and will never join this call" in done.stderr


class GoneStore:
    """A store whose host is gone: it never answers."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def clone(self) -> GoneStore:
        return self

    def set(self, key: str, value: str) -> None:
        assert value == "0", "end_run has asked the store, and would hang"

    def get(self, key: str) -> str:
        self.ended.wait(HANG)
        return "0"


def test_a_store_that_never_answers_holds_nobody_up() -> None:
    store = GoneStore()
    world = ReturnedRanks(store, 1, True)  # type: ignore[arg-type] # a double
    begun = time.monotonic()
    assert not world.has(0)
    assert not world.has(2)
    world.end_run()
    store.ended.set()
    assert time.monotonic() - begun < SECONDS
