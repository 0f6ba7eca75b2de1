"""Groups that were destroyed leave nothing: no threads, no descriptors, no memory."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist import comm
from minidist.comm.transport import algorithm_choice
from tests.helpers import warm_python
from tests.helpers.clocks import HANG

Clusters = Callable[[int], md.Cluster]


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
    return before, holdings(), len(algorithm_choice.memories)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("groups", [20, pytest.param(300, marks=pytest.mark.deep)])
def test_groups_leave_nothing(groups: int) -> None:
    with md.Cluster(2, timeout=500.0) as cluster:
        for before, after, known in cluster.run(make_and_destroy, groups):
            assert known == 0  # not even the world's: it made no call
            threads, descriptors, memory = (b - a for a, b in zip(before, after, strict=True))
            assert threads <= 2  # a thread that has been told to end may take a moment
            assert descriptors <= 2
            assert memory < 16  # a group that stays takes 6


def test_a_mesh_makes_its_groups_once(cluster_of: Clusters) -> None:
    def make() -> bool:
        meshes = [md.comm.Mesh(dp=2, tp=2) for _ in range(2)]
        same = meshes[0].group("tp") is meshes[1].group("tp")
        group = meshes[0].group("tp")
        del meshes
        return same and group is md.comm.Mesh(dp=2, tp=2).group("tp")

    assert all(cluster_of(4).run(make))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_world_of_torchs_own_ends_its_threads(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
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
        )
    )
    done = warm_python.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        timeout=HANG,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    ranks = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(ranks) == 2
    assert all(left == 0 < running for running, left in ranks), ranks
