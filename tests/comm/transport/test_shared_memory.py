"""Shared memory: results equal one process, in place and staged; and nothing is left when ranks fail."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.comm import work
from minidist.comm.transport import ipc, shared_memory
from tests.comm.one_process import REDUCE, exact, inputs
from tests.helpers.clocks import HANG
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import error_of

pytestmark = pytest.mark.skipif(not ipc.has_semaphores(), reason="needs Linux, for shared semaphores")


@on_ranks(2, 3, shared=(True, False))
def test_large_tensors(shared: bool) -> None:
    """Three chunks and a bit, with buffers of the real size. All ranks get the same bits."""
    length = 3 * 2**18 + 5
    parts = [torch.rand(length, generator=torch.Generator().manual_seed(r)) for r in range(md.size())]
    wanted = parts[0]
    for part in parts[1:]:
        wanted = wanted + part  # in the same order, so the same bits
    x = parts[md.rank()]
    if shared:
        x = comm.empty_shared(x.shape).copy_(x)
    exact(comm.all_reduce(x), wanted)


@on_ranks(2)
def test_asynchronous_calls_run_in_order_while_the_rank_computes() -> None:
    x = [torch.full((1000,), float(md.rank() + i)) for i in range(10)]
    comm.barrier()  # makes the memory
    with comm.ledger() as ledger:
        begun = time.perf_counter()
        works = [comm.all_reduce(part, async_op=True) for part in x]
        last = comm.all_reduce(torch.ones(3), "max")  # after those that are under way
        while not all(work.done() for work in works):
            time.sleep(0.001)
        complete = time.perf_counter() - begun
        time.sleep(0.1)
        for i, work in enumerate(works):
            exact(work.wait(), torch.full((1000,), 2.0 * i + 1))
    exact(last, torch.ones(3))
    assert 0 < ledger.comm_overlap < 1
    # The thread says when a call was complete, not when somebody asked.
    assert max(call.seconds for call in ledger.calls) <= complete


@on_ranks(2)
def test_memory_goes_with_the_last_tensor() -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:minidist" in line for line in lines)

    comm.barrier()
    before = mapped()
    x = comm.empty_shared((1000,))
    part = x[3:5]
    assert mapped() == before + 1
    del x
    assert mapped() == before + 1
    part += 1
    del part
    assert mapped() == before


def test_nothing_has_a_name_that_could_be_left_behind() -> None:
    def hold() -> list[str]:
        comm.all_reduce(comm.empty_shared((10**5,)))
        return sorted(os.listdir("/dev/shm"))

    before = sorted(os.listdir("/dev/shm"))
    assert md.launch(hold, ranks=2) == [before, before]


def test_different_calls_are_told_on_all_ranks() -> None:
    def differ() -> None:
        comm.barrier()
        if md.rank() == 1:
            comm.all_reduce(torch.ones(3), algorithm="shared_memory")
        else:
            comm.all_gather(torch.ones(4), algorithm="shared_memory")

    with md.Cluster(3) as cluster:
        for message in cluster.run(error_of, comm.CollectiveError, differ):
            assert "all_reduce (sum) of float32[3]" in message
            assert "all_gather of float32[4]" in message  # as it was given, not the result


def test_after_a_failure_there_is_no_further_call() -> None:
    def again() -> list[str]:
        messages = []
        for length in (3 + md.rank(), 2, 2):
            try:
                comm.all_reduce(torch.ones(length))
            except comm.CollectiveError as error:
                messages.append(str(error))
        return messages

    with md.Cluster(2) as cluster:
        for first, *others in cluster.run(again):
            assert "float32[3]" in first
            assert "float32[4]" in first
            assert len(others) == 2
            assert all("an earlier call on these ranks failed" in other for other in others)


def test_a_peer_that_is_killed_is_noticed_soon(capfd: pytest.CaptureFixture[str]) -> None:
    def die() -> None:
        x = comm.empty_shared((100,))
        for i in range(1000):
            if i == 5 and md.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                comm.all_reduce(x)
            except comm.CollectiveError as error:
                print(f"noticed: {error}")
                time.sleep(2.0)
                raise

    begun = time.monotonic()
    with pytest.raises(md.RankDied, match="rank 1 was killed by SIGKILL"):
        md.launch(die, ranks=3, timeout=HANG)
    assert time.monotonic() - begun < HANG / 2
    assert capfd.readouterr().out.count("another rank's process has ended") <= 2


def test_a_host_that_is_not_the_same_has_no_shared_memory() -> None:
    def elsewhere() -> tuple[str, str]:
        os.environ["MINIDIST_HOST"] = str(md.rank())
        with comm.ledger() as ledger:
            comm.all_reduce(torch.ones(1))
        try:
            comm.all_reduce(torch.ones(1), algorithm="shared_memory")
        except ValueError as error:
            return ledger.calls[0].algorithm, str(error)
        return ledger.calls[0].algorithm, ""

    for algorithm, message in md.launch(elsewhere, ranks=2):
        assert algorithm == "torch"
        assert "all_reduce cannot go through shared memory: the ranks are on 2 hosts" in message


@pytest.mark.parametrize(("ranks", "hosts"), [(4, [0, 0, 1, 1]), (5, [0, 1, 0, 2, 2]), (3, [0, 1, 2])])
def test_hierarchical_reduces_inside_hosts_and_between_them(ranks: int, hosts: list[int]) -> None:
    def reduce() -> list[tuple[int, int]]:
        os.environ["MINIDIST_HOST"] = str(hosts[md.rank()])
        sizes = []
        for length in (0, 1, 7, 24, 1000):
            for op in ("sum", "mean", "max"):
                rows = inputs(length, (length,), torch.float64, md.size())
                with comm.ledger() as ledger:
                    x = comm.all_reduce(rows[md.rank()].clone(), op, algorithm="hierarchical")
                torch.testing.assert_close(x, REDUCE[op](rows) if length else x)
                sizes.append((ledger.bytes_sent, ledger.bytes_on_wire))
        return sizes

    results = md.launch(reduce, ranks=ranks)
    if ranks == 4:  # 24 doubles: half of them stays on each rank's ring of 2, and inside 1/2 + 1/2 of all
        assert {sizes[9] for sizes in results} == {(24 * 8 + 12 * 8, 12 * 8)}


@on_ranks(2, algorithm=("auto", "ring"))
def test_tensors_made_in_inference_mode(algorithm: str) -> None:
    work.forget_groups()  # so that the staging buffers are made here
    comm.barrier()
    totals = []
    with torch.inference_mode():
        inside, outside = torch.ones(1), torch.ones(1)
        totals.append(comm.all_reduce(inside, algorithm=algorithm).clone())
        totals.append(comm.all_reduce(inside, algorithm=algorithm, async_op=True).wait())
    totals.append(comm.all_reduce(outside, algorithm=algorithm))
    totals.append(comm.all_reduce(torch.ones(1), algorithm=algorithm))
    assert totals == [2.0, 4.0, 2.0, 2.0]


def test_hierarchical_and_others_at_once() -> None:
    def reduce() -> tuple[torch.Tensor, torch.Tensor]:
        os.environ["MINIDIST_HOST"] = str(md.rank())
        comm.barrier()
        one, other = torch.ones(1_000_003), torch.full((1_000_003,), 10.0)
        works = [
            comm.all_reduce(one, algorithm="hierarchical", async_op=True),
            comm.all_reduce(other, algorithm="ring", async_op=True),
        ]
        return tuple(work.wait().unique() for work in works)  # type: ignore[return-value]

    for one, other in md.launch(reduce, ranks=2):
        assert one.tolist() == [2.0]
        assert other.tolist() == [20.0]


def test_a_peer_may_end_once_it_has_come() -> None:
    """The peer ends after its last call, just before the rank that waits checks whether it is alive."""

    class Peer:
        def alive(self) -> bool:
            late.clear()
            return False

    late = [1]
    waiting = object.__new__(shared_memory.SharedMemory)
    waiting.names, waiting.peers = [0, 1], [Peer(), Peer()]  # type: ignore[list-item]
    waiting.look_after(lambda: list(late))
    assert not late, "it was looked at"


@on_ranks(4, cores=(3, 4))
def test_a_small_group_spins_only_where_every_rank_of_the_host_has_a_core(cores: int) -> None:
    group = md.comm.Mesh(dp=2, tp=2).group("tp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: range(cores))
        spins = shared_memory.SharedMemory(group, 30.0).process_barrier.spins
    assert spins == (ipc.SPINS if cores == 4 else 0)
