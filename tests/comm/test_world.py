"""The world: joining torchrun's, being one alone, and what is said when that fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import minidist as md
from minidist import comm
from tests.comm.programs import run_script, torchrun


def test_a_process_alone_is_a_world_of_one() -> None:
    md.init()
    assert (md.rank(), md.size(), md.local_rank()) == (0, 1, 0)
    assert comm.device().type in ("cpu", "cuda")
    md.shutdown()


FEW_GPUS = """
import warnings
import torch
import torch.distributed as dist
from minidist.comm import world

torch.cuda.set_device = lambda device: None
dist.is_nccl_available = lambda: True
for gpus in range(3):
    backends = []
    torch.cuda.device_count = lambda: gpus
    dist.init_process_group = lambda backend, **_: backends.append(backend)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for own in range(2):
            world.join(dist.HashStore(), own, 2, world.timedelta(seconds=9))
    print(backends, len(said), *(each.message for each in said))
"""


def test_ranks_that_leave_a_gpu_idle_say_so_once(tmp_path: Path) -> None:
    done = run_script(tmp_path, FEW_GPUS)
    assert done.returncode == 0, done.stderr
    for gpus, line in enumerate(done.stdout.splitlines(keepends=True)):
        backend = "cpu:gloo,cuda:nccl" if gpus == 2 else "gloo"
        assert line.startswith(f"{[backend] * 2} {int(gpus == 1)}")
        told = "2 ranks of this machine see 1 GPU(s), so all ranks compute on CPUs" in line
        assert told == (gpus == 1)
    assert gpus == 2


def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        """
        import torch
        import minidist as md
        from minidist import comm

        def train(scale):
            md.init()
            x = torch.ones(2) * scale * (md.rank() + 1)
            comm.all_reduce(x)
            return md.rank(), x.tolist()

        results = md.launch(train, ranks=2, args=(10,))
        assert results == [(0, [30.0, 30.0]), (1, [30.0, 30.0])], results
        try:
            md.launch(train, ranks=3)
        except ValueError as error:
            print(f"{md.rank()}/{md.size()} {md.local_rank()} {error}", flush=True)
        md.shutdown()
        """,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"{rank}/2 {rank} torchrun started 2 ranks and the program asks for 3" in done.stdout


@pytest.mark.deep
def test_a_world_that_was_left_leaves_no_threads(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        """
        import gc, os, torch
        import minidist as md
        from minidist import comm

        md.init()
        gc.disable()  # what is left must not wait for the collector: at the interpreter's end it is too late
        for algorithm in ("torch", "shared_memory", "ring"):
            comm.all_reduce(torch.ones(2), algorithm=algorithm)
            comm.all_reduce(torch.ones(2), algorithm=algorithm, async_op=True).wait()
        running = len(os.listdir("/proc/self/task"))
        md.shutdown()
        assert len(os.listdir("/proc/self/task")) < min(running, 3), running
        """,
    )
    assert done.returncode == 0, done.stderr


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        describe(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with pytest.raises(RuntimeError, match=rf"port {port} on 127\.0\.0\.1 is in use .*set MASTER_PORT"):
            md.init(timeout=5)


def test_a_rank_whose_world_never_comes_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    describe(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with pytest.raises(TimeoutError, match=r"rank 0 .* world of 2"):
        md.init(timeout=1)


def test_a_time_limit_has_to_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout is 0"):
        md.init(timeout=0)


def describe(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
