"""Calls under way and groups: what is destroyed leaves nothing, and two threads in one group are an error."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist import comm
from minidist.comm import ledgers, work
from tests.comm.programs import run_script
from tests.helpers.clocks import HANG, Clock
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import error_of

READS_PROC = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def holdings() -> tuple[int, int, int]:
    """This process's threads, descriptors and MiB of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4096 >> 20


def make_and_destroy(groups: int) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    """What a rank holds after a few groups, and after many; and the groups that are known."""
    for number in range(groups + 5):
        if number == 5:
            before = holdings()
        group = dist.new_group([0, 1])
        for algorithm in ("shared_memory", "ring", "torch"):
            comm.all_reduce(torch.ones(4), algorithm=algorithm, group=group)
            comm.all_reduce(torch.ones(4), algorithm=algorithm, group=group, async_op=True).wait()
        comm.send(torch.ones(1), 1, group=group) if md.rank() == 0 else comm.recv(
            torch.ones(1), 0, group=group
        )
        dist.destroy_process_group(group)
        del group
    return before, holdings(), len(work._known)


@READS_PROC
@pytest.mark.parametrize("groups", [20, pytest.param(300, marks=pytest.mark.deep)])
def test_groups_leave_nothing(groups: int) -> None:
    with md.Cluster(2, timeout=500.0) as cluster:
        for before, after, known in cluster.run(make_and_destroy, groups):
            assert known == 1  # the world
            threads, descriptors, memory = (b - a for a, b in zip(before, after, strict=True))
            assert threads <= 2  # a thread that has been told to end may take a moment
            assert descriptors <= 2
            assert memory < 16  # a group that stays takes 6


@READS_PROC
def test_a_world_of_torchs_own_ends_its_threads(tmp_path: Path) -> None:
    program = """
        import os, sys, time, torch
        import torch.distributed as dist
        from minidist import comm

        def threads():
            return len(os.listdir("/proc/self/task"))

        before = threads()
        child = os.fork()  # before there are threads
        rank = 0 if child else 1
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
        for algorithm in ("torch", "shared_memory", "ring"):
            comm.all_reduce(torch.ones(2), algorithm=algorithm)
            comm.all_reduce(torch.ones(2), algorithm=algorithm, async_op=True).wait()
        running = threads()
        dist.destroy_process_group()
        begun = time.monotonic()
        while threads() > before and time.monotonic() < begun + 100:
            time.sleep(0.01)
        os.write(1, f"{running} {threads() - before}\\n".encode())
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run_script(tmp_path, program, str(tmp_path / "store"), GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    ranks = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(ranks) == 2
    assert all(left == 0 < running for running, left in ranks), ranks


def in_two_threads(group: work.Group, other: work.Group) -> tuple[list[str], list[float]]:
    """The errors of two threads, one inside a call of `group` while one makes a call of `other`; and sums."""
    inside, sums = threading.Barrier(2, timeout=HANG), list[float]()
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

    with ThreadPoolExecutor(2) as pool:
        errors = [*pool.map(partial(error_of, md.CollectiveError), (first, second))]
    sums.append(float(reduced(torch.ones(()), group=group)))  # the group is free again
    return errors, sums


def test_two_threads_in_one_group_both_get_an_error() -> None:
    with md.Cluster(2, timeout=HANG) as cluster:  # of its own: the error leaves ranks out of step
        found = cluster.run(in_two_threads, None, None)
    for errors, sums in found:
        for text in errors:
            assert "two threads of this rank are in collectives of one group at once, all_reduce of" in text
        assert sums == [2.0]


def test_the_ledger_times_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 1 s, and its message 5 s more, during which the rank works for 2 s."""
    clock = Clock()
    monkeypatch.setattr(work, "time", clock)
    with comm.ledger() as ledger:
        call = ledgers.Call("all_reduce", "torch", "float32", (8,), (0, 1), 32)
        message = SimpleNamespace(wait=lambda: clock.sleep(3.0))
        under_way = work.Work(call, lambda at_once: clock.sleep(1.0) or message, lambda: None, True)
        clock.sleep(2.0)
        under_way.wait()
    assert (ledger.calls[0].seconds, ledger.calls[0].waited) == (6.0, 4.0)


@on_ranks(2)
def test_a_send_that_nobody_waits_for_still_arrives() -> None:
    import gc

    other = 1 - md.rank()
    comm.send(torch.full((3,), float(md.rank())), other, async_op=True)
    gc.collect()
    time.sleep(0.05)
    assert comm.recv(torch.empty(3), other).tolist() == [float(other)] * 3
    comm.barrier()


@on_ranks(1)
def test_threads_that_come_at_once_share_a_record() -> None:
    group, ask, met = dist.new_group([0]), dist.get_process_group_ranks, list[work.Known]()

    def slow(of: dist.ProcessGroup) -> list[int]:
        dist.get_process_group_ranks = ask
        met.append(work.known(of))  # as another thread does meanwhile
        return ask(of)

    dist.get_process_group_ranks = slow
    assert work.known(group) is met[0]
