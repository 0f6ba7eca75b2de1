"""Launching: results in order, errors that name the rank, and nothing left running, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist import comm
from minidist.comm.errors import FOLLOWS
from minidist.comm.launching import rank_processes, worker
from minidist.comm.launching.cluster import available_cores
from tests.comm.programs import run_as_users_do, written
from tests.conftest import Clusters
from tests.helpers import warm_python
from tests.helpers.clocks import HANG, until
from tests.helpers.fresh_python import output_of
from tests.helpers.processes import alive, descendants, wait_until_gone
from tests.helpers.refusals import error_of, refuses


@contextlib.contextmanager
def program(tmp_path: Path, text: str, **environment: str) -> Iterator[Any]:
    """A script in a process of its own, killed at the end if it still runs."""
    process = warm_python.Popen(
        [sys.executable, str(written(tmp_path, text))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MINIDIST_PRELOAD": "", **environment},  # none of these makes an optimizer
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_results_come_back_in_rank_order(cluster_of: Clusters) -> None:
    assert cluster_of(4).run(md.rank) == [0, 1, 2, 3]
    assert cluster_of(4).run(md.size) == [4] * 4
    assert cluster_of(4).run(md.local_rank) == [0, 1, 2, 3]


def test_closures_arguments_and_tensors_travel(cluster_of: Clusters) -> None:
    offset = torch.arange(3.0)

    def add(scale: float, *, shift: int = 0) -> torch.Tensor:
        return offset * scale + md.rank() + shift

    for rank, result in enumerate(cluster_of(2).run(add, 2.0, shift=10)):
        torch.testing.assert_close(result, offset * 2 + rank + 10, rtol=0, atol=0)


def test_launch_passes_arguments_by_name_and_sets_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    made = md.Cluster.__init__

    def noted(self: md.Cluster, ranks: int, timeout: float | None = 60.0, *args: Any, **kwargs: Any) -> None:
        limits.append(timeout)
        made(self, ranks, timeout, *args, **kwargs)

    monkeypatch.setattr(md.Cluster, "__init__", noted)
    assert md.launch(divmod, 1, (7, 2)) == [(3, 1)]
    assert md.launch(int, 1, ("ff",), kwargs={"base": 16}) == [255]
    assert limits == [None, None]


def test_functions_that_name_modules_of_own_classes_travel(cluster_of: Clusters) -> None:
    def benchmarks() -> tuple[bool, bool]:
        with torch.backends.cudnn.flags(enabled=False, benchmark=True):
            return torch.backends.cudnn.enabled, torch.backends.mkldnn.is_available()

    assert cluster_of(2).run(benchmarks) == [(False, torch.backends.mkldnn.is_available())] * 2


class Own(torch.optim.SGD):
    """An optimizer whose class travels by value."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_that_stepped_here_travels_without_this_process_hooks(cluster_of: Clusters) -> None:
    """torch wraps its `step` once, with the hooks of the process."""
    sharded = md.FullyShard(torch.nn.Linear(1, 1), Own, lr=0.1)  # it hooks into every optimizer's step
    sharded(torch.ones(1, 1)).sum().backward()
    sharded.step()
    Own([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()

    def told() -> str:
        model = md.DataParallel(torch.nn.Linear(1, 1), overlap=False)
        optimizer = Own(model.parameters(), lr=0.1)
        model(torch.ones(1, 1)).sum().backward()
        return error_of(RuntimeError, optimizer.step)

    for text in cluster_of(2).run(told):
        assert "call the DataParallel's synchronize" in text  # the rank's own hook


def test_a_function_with_an_attribute_of_that_name_travels(cluster_of: Clusters) -> None:
    def five() -> int:
        return 5

    five.hooked = True  # type: ignore[attr-defined]
    assert cluster_of(2).run(five) == [5, 5]


class Tally:
    """An object that only its rank has: a lock cannot be sent."""

    def __init__(self, start: int) -> None:
        self.value, self.lock = start + md.rank(), threading.Lock()

    def add(self, other: int) -> int:
        self.value += other
        return self.value


def test_ranks_keep_objects_between_runs() -> None:
    def alive() -> int:
        return sum(type(each).__name__ == "Tally" for each in gc.get_objects())

    with md.Cluster(ranks=2) as cluster, md.Cluster(ranks=1) as other:
        tally = cluster.keep(Tally, start=10)
        assert cluster.run(Tally.add, tally, 5) == [15, 16]
        assert cluster.run(lambda: tally.add(1)) == [16, 17]
        assert cluster.run(lambda made: made["it"][0].value, {"it": [tally]}) == [16, 17]
        pair = [tally, cluster.keep(Tally, 0)]
        assert cluster.run(lambda made: [each.value for each in made], pair) == [[16, 0], [17, 1]]
        assert cluster.run(alive) == [2, 2]
        pair.clear()
        assert cluster.run(alive) == [1, 1]
        with pytest.raises(RuntimeError, match=r"do not hold Kept\(what Tally .*another Cluster made it"):
            other.run(Tally.add, tally, 1)
        assert other.run(md.size) == [1]  # its processes are the same
        with pytest.raises(TypeError, match="stands for objects in a Cluster's ranks"):
            pickle.dumps(tally)
        with pytest.raises(TypeError, match=r"function is 3, of type int"):
            cluster.keep(3)  # type: ignore[arg-type]
        with pytest.raises(md.RankError, match=r"Tally\.__init__"):
            cluster.keep(Tally)
        with pytest.raises(RuntimeError, match=r"a run has failed since.*call keep again"):
            cluster.run(Tally.add, tally, 1)


def mismatch(asynchronous: bool) -> bool:
    """Make a call that differs between the ranks, and catch its error."""
    try:
        done = comm.all_reduce(torch.ones(2 + md.rank()), async_op=asynchronous)
        if isinstance(done, comm.Work):
            done.wait()
    except md.CollectiveError:
        return True
    return False


def right(scale: float) -> list[float]:
    works = [comm.all_reduce(torch.full((3,), scale), async_op=flag) for flag in (True, False)]
    ring = comm.all_reduce(torch.full((5,), scale), algorithm="ring")
    return [(work.wait() if isinstance(work, comm.Work) else work).sum().item() for work in (*works, ring)]


@pytest.mark.parametrize(
    ("times", "check"), [(1, True), (1, False), pytest.param(30, True, marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_caught_mismatch_is_over_at_the_next_run(times: int, check: bool, asynchronous: bool) -> None:
    with md.Cluster(2, timeout=20.0, check=check) as cluster:
        if not check:
            cluster.run(right, 1.0)  # makes shared memory, where a mismatch is noticed without a check
        for number in range(times):
            assert cluster.run(mismatch, asynchronous) == [True, True]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert cluster.run(right, number) == [[6.0 * number, 6.0 * number, 10.0 * number]] * 2
            # With a check a synchronous call never began; of asynchronous ones the first mostly has.
            assert len(caught) in {(True, False): [0], (True, True): [0, 1]}.get((check, asynchronous), [1])
            assert all("fresh processes replace the ranks" in str(each.message) for each in caught)


def seconds_to_ask_again() -> int:
    """Seconds that this thread waits for a name server's answer: the first number of glibc's resolver."""
    state = ctypes.CDLL(None)["__res_state"]
    state.restype = ctypes.POINTER(ctypes.c_int)
    return int(state()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resolver of Linux's C library")
def test_a_rank_does_not_wait_long_for_a_name_server_that_lost_its_question(cluster_of: Clusters) -> None:
    assert set(cluster_of(2).run(seconds_to_ask_again)) == {1}


def test_launch_starts_fresh_processes() -> None:
    first, second = (md.launch(os.getpid, ranks=2) for _ in range(2))
    assert len({*first, *second, os.getpid()}) == 5
    wait_until_gone([*first, *second])


def test_a_warm_cluster_keeps_its_processes(cluster_of: Clusters) -> None:
    assert cluster_of(2).run(os.getpid) == cluster_of(2).run(os.getpid)


def test_what_is_kept_may_take_any_argument(cluster_of: Clusters) -> None:
    kept = cluster_of(2).keep(dict, key=3, make=4)
    assert cluster_of(2).run(sorted, kept) == [["key", "make"]] * 2


def test_a_rank_whose_parent_has_died_before_it_serves_ends() -> None:
    text = "from minidist.comm.launching import worker; worker.serve(0, -1, -1)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_unfinished_line_is_sent_once_it_is_long() -> None:
    sent: list[Any] = []
    stream = worker.RankStream(lambda *message: sent.append(message), "stdout", 1)
    for _ in range(3):
        stream.write("x" * (worker.LONGEST_LINE // 2))
    assert [len(text) for _, _, text in sent] == [3 * worker.LONGEST_LINE // 2 + 1]


def test_a_supervisor_that_has_not_answered_is_not_waited_for() -> None:
    process, starter = mock.Mock(), mock.Mock(answered=False)
    process.wait.return_value, process.supervisor = False, starter
    rank_processes.stop([process], os.getpid(), 0.0)
    assert process.wait.call_args.args == (0.0,)
    starter.abandon.assert_called_once()


def test_threads_are_the_cores_divided_by_the_ranks() -> None:
    def threads() -> set[int]:
        import numpy  # noqa: F401
        from threadpoolctl import threadpool_info

        return {torch.get_num_threads(), *(library["num_threads"] for library in threadpool_info())}

    assert md.launch(threads, ranks=1) == [{available_cores()}]
    assert md.launch(threads, ranks=4) == [{max(1, available_cores() // 4)}] * 4
    assert md.launch(threads, ranks=1, threads=3) == [{3}]


def test_prints_are_labelled_with_the_rank(cluster_of: Clusters, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("one")
        print("two\nthree", end="")
        print("oops", file=sys.stderr)

    cluster_of(2).run(speak)
    printed = capsys.readouterr()
    for rank in range(2):
        mine = [line for line in printed.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert [line.removeprefix(f"[rank {rank}] ") for line in mine] == ["one", "two", "three"]
        assert f"[rank {rank}] oops\n" in printed.err


def test_an_exception_names_the_rank_before_the_time_limit(cluster_of: Clusters) -> None:
    cluster = cluster_of(4)
    before = cluster.run(os.getpid)

    def fail() -> None:
        if md.rank() == 2:
            raise KeyError("no such weight")
        comm.barrier()

    started = time.monotonic()
    with pytest.raises(md.RankError, match="rank 2 raised KeyError: 'no such weight'") as caught:
        cluster.run(fail)
    assert time.monotonic() - started < HANG / 2
    assert caught.value.rank == 2
    assert 'raise KeyError("no such weight")' in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)
    wait_until_gone(before)
    assert cluster.run(md.rank) == [0, 1, 2, 3], "the cluster is usable again"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_rank_is_named_with_its_signal(cluster_of: Clusters, number: signal.Signals) -> None:
    def die() -> None:
        if md.rank() == 1:
            os.kill(os.getpid(), number)
        comm.barrier()

    started = time.monotonic()
    with pytest.raises(md.RankDied, match=f"rank 1 was killed by {number.name}") as caught:
        cluster_of(3).run(die)
    assert time.monotonic() - started < HANG / 2
    assert (caught.value.rank, caught.value.signal) == (1, number.name)
    assert cluster_of(3).run(md.rank) == [0, 1, 2]


def test_a_rank_that_exits_is_an_error(cluster_of: Clusters) -> None:
    with pytest.raises(md.RankDied, match="rank 0 ended with exit code 0 before it returned"):
        cluster_of(2).run(lambda: os._exit(0) if md.rank() == 0 else comm.barrier())
    with pytest.raises(md.RankError, match="rank 1 raised SystemExit: 3"):
        cluster_of(2).run(lambda: sys.exit(3) if md.rank() == 1 else comm.barrier())


def test_a_rank_that_died_between_runs_is_an_error(cluster_of: Clusters) -> None:
    victim = cluster_of(2).run(os.getpid)[1]
    os.kill(victim, signal.SIGKILL)
    wait_until_gone([victim])
    with pytest.raises(md.RankDied, match="rank 1 was killed by SIGKILL"):
        cluster_of(2).run(md.rank)
    assert cluster_of(2).run(md.rank) == [0, 1]


def test_the_time_limit_says_where_each_rank_was() -> None:
    def stuck_here() -> None:
        time.sleep(HANG)

    def wait_for_all() -> None:
        if md.rank() == 1:
            stuck_here()
        comm.barrier()

    with md.Cluster(ranks=2, timeout=1.0) as cluster:
        started = time.monotonic()
        with pytest.raises(md.RankTimeout, match="had not returned within 1 s") as caught:
            cluster.run(wait_for_all)
        assert time.monotonic() - started < HANG / 2
        assert "in stuck_here" in caught.value.traceback
        assert "in barrier" in caught.value.traceback
        assert isinstance(caught.value, TimeoutError)


def test_a_rank_stopped_in_a_message_does_not_hang_the_caller() -> None:
    """The rank stops before it reads a call that exceeds its socket's room, or while it sends its result."""

    def answer_at_length() -> bytes:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return bytes(300_000_000)

    with md.Cluster(ranks=2, timeout=1.0) as cluster:
        os.kill(cluster.run(os.getpid)[1], signal.SIGSTOP)
        with pytest.raises(md.RankTimeout, match="rank 1 had not returned"):
            cluster.run(len, bytes(10_000_000))
        with pytest.raises(md.RankTimeout, match="had not returned"):
            cluster.run(answer_at_length)
        assert cluster.run(len, bytes(10_000_000)) == [10_000_000] * 2


def test_a_stopped_supervisor_does_not_hang_the_caller(tmp_path: Path) -> None:
    text = """
        import os, signal, time
        import minidist as md
        from minidist.comm.launching import rank_processes
        rank_processes.KILL_TIMEOUT = 0.5
        cluster = md.Cluster(2, timeout=1)
        ranks = cluster.run(os.getpid)
        parent, = set(cluster.run(os.getppid))
        os.kill(parent, signal.SIGSTOP)
        start = time.monotonic()
        try:
            cluster.run(time.sleep, 300)
        except md.RankTimeout as error:
            print(time.monotonic() - start < 150, *ranks, flush=True)
        print(md.launch(md.rank, 2))
    """
    with program(tmp_path, text) as caller:
        out, err = caller.communicate(timeout=HANG)
    fast, *ranks = out.splitlines()[0].split()
    assert (fast, out.splitlines()[1], err) == ("True", "[0, 1]", "")
    wait_until_gone([int(rank) for rank in ranks])


def test_a_script_that_hides_a_module_is_named(tmp_path: Path) -> None:
    """torch imports timeit, so every new process would import the script and start yet another one."""
    (tmp_path / "timeit.py").write_text("import minidist as md\nmd.launch(md.rank, ranks=2)\n")
    done = run_as_users_do(tmp_path / "timeit.py")
    assert done.returncode == 1
    assert f"{tmp_path / 'timeit.py'} was imported while ranks were being started" in done.stderr
    assert "rename it" in done.stderr


def test_a_function_may_put_its_own_streams_in_place(cluster_of: Clusters) -> None:
    def replace() -> int:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = None  # type: ignore[assignment]
        return 1

    assert cluster_of(2).run(replace) == [1, 1]
    assert cluster_of(2).run(lambda: type(sys.stdout).__name__) == ["RankStream"] * 2


def test_a_long_line_is_printed_at_once(cluster_of: Clusters, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        for _ in range(200_000):
            sys.stdout.write("0123456789")

    cluster_of(1).run(speak)
    assert capsys.readouterr().out.replace("[rank 0] ", "").replace("\n", "") == "0123456789" * 200_000


def test_an_exception_that_only_the_rank_knows_keeps_its_cause(cluster_of: Clusters, tmp_path: Path) -> None:
    (tmp_path / "only_in_rank.py").write_text("class Oops(Exception): pass\n")

    def fail(returned: bool) -> object:
        sys.path.insert(0, str(tmp_path))
        import only_in_rank  # type: ignore[import-not-found]

        if returned:
            return only_in_rank.Oops()
        raise only_in_rank.Oops("the real cause")

    with pytest.raises(md.RankError, match=r"rank \d raised only_in_rank.Oops: the real cause"):
        cluster_of(2).run(fail, False)
    with pytest.raises(md.RankError, match="rank 0 returned a value that this process cannot read"):
        cluster_of(2).run(fail, True)


@pytest.mark.parametrize(
    "error",
    [
        md.RankDied("rank 1 was killed", rank=1, exit_code=-9, signal="SIGKILL"),
        md.RankTimeout("rank 0 had not returned", rank=0, traceback="rank 0 was at:"),
    ],
)
def test_an_error_travels_between_processes(error: md.RankError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.__dict__) == (type(error), str(error), error.__dict__)


def test_a_function_that_leaves_the_world_is_told(cluster_of: Clusters) -> None:
    with pytest.raises(md.RankError, match="the function left this rank's world"):
        cluster_of(2).run(dist.destroy_process_group)
    assert cluster_of(2).run(md.size) == [2, 2]


def test_a_fork_of_the_caller_cannot_use_its_cluster(cluster_of: Clusters) -> None:
    cluster = cluster_of(2)

    def use(queue: Any) -> None:
        try:
            queue.put(cluster.run(md.rank))
        except RuntimeError as error:
            queue.put(str(error))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn when a process with threads forks
        child = context.Process(target=use, args=(queue,))
        child.start()
    assert "belongs to the process that was forked" in queue.get(timeout=HANG)
    child.join(HANG)
    assert cluster.run(md.rank) == [0, 1]


def test_environment_and_directory_are_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAID_BY_THE_CALLER", "yes")
    monkeypatch.chdir(tmp_path)
    heard = md.launch(lambda: (os.environ.get("SAID_BY_THE_CALLER"), os.getcwd()), ranks=2)
    assert heard == [("yes", str(tmp_path))] * 2


def test_closing_while_a_function_runs_says_so(tmp_path: Path) -> None:
    runs = tmp_path / "it runs"
    cluster = md.Cluster(ranks=1)
    closer = threading.Thread(target=lambda: (until(runs.exists), cluster.close()))
    closer.start()
    with pytest.raises(RuntimeError, match="this Cluster was closed while it ran a function"):
        cluster.run(lambda: (runs.touch(), time.sleep(HANG)))
    closer.join()
    with pytest.raises(RuntimeError, match="this Cluster is closed"):
        cluster.run(md.rank)


def test_what_cannot_be_sent_is_said(cluster_of: Clusters) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to another process .*create such objects inside"):
        cluster_of(2).run(lambda: lock)
    with pytest.raises(md.RankError, match="returned a lock that cannot be sent back"):
        cluster_of(2).run(threading.Lock)
    with pytest.raises(TypeError, match="give the function itself"):
        cluster_of(2).run(3)  # type: ignore[arg-type]
    cluster = cluster_of(2)
    with pytest.raises(TypeError, match="a Cluster cannot be sent to a rank"):
        cluster.run(lambda: cluster)


test_wrong_arguments = refuses(
    partial(md.launch, md.rank),
    ({"ranks": 0}, "ranks is 0; give at least 1"),
    ({"ranks": "4"}, TypeError, r"ranks is '4' \(str\); give an integer"),
    ({"ranks": 2.0}, TypeError, r"ranks is 2.0 \(float\); give an integer"),
    ({"ranks": 1, "timeout": 0}, "timeout is 0; give seconds above 0 and up to 1000000"),
    ({"ranks": 1, "timeout": float("nan")}, "timeout is nan"),
    ({"ranks": 1, "timeout": float("inf")}, "timeout is inf"),
    ({"ranks": 1, "start_timeout": float("inf")}, "start_timeout is inf"),
    ({"ranks": 1, "threads": 0}, "threads is 0"),
    ({"ranks": 1, "args": 3}, TypeError, r"args is 3; give a tuple, such as \(3,\)"),
    (
        {"ranks": 1, "kwargs": ("base", 16)},
        TypeError,
        r"kwargs is \('base', 16\); give a dict of arguments by name",
    ),
)


def test_a_closed_cluster_says_so() -> None:
    cluster = md.Cluster(ranks=1)
    processes = cluster.run(os.getpid)
    cluster.close()
    cluster.close()
    wait_until_gone(processes)
    assert "closed" in repr(cluster)
    with pytest.raises(RuntimeError, match="this Cluster is closed"):
        cluster.run(md.rank)


def test_a_forgotten_cluster_leaves_nothing() -> None:
    processes = md.Cluster(ranks=2).run(os.getpid)
    wait_until_gone(processes)


@pytest.mark.parametrize("times", [6, pytest.param(20, marks=pytest.mark.deep)])
def test_ranks_killed_at_random_moments(times: int) -> None:
    """Each time the error names the victim, no process is left, and the next run works."""
    rng = random.Random(5)

    def talk() -> None:
        x = torch.ones(1000)
        while True:
            comm.all_reduce(x, "mean")

    seen: set[int] = set()
    with md.Cluster(ranks=3, timeout=HANG) as cluster:
        for _ in range(times):
            processes = cluster.run(os.getpid)
            seen.update(processes)
            victim = rng.randrange(3)
            timer = threading.Timer(rng.uniform(0.0, 0.05), os.kill, (processes[victim], signal.SIGKILL))
            timer.start()
            with pytest.raises(md.RankDied, match=f"rank {victim} was killed by SIGKILL"):
                cluster.run(talk)
            timer.join()
    assert len(seen) == 3 * times
    wait_until_gone(list(seen))


def test_a_death_that_is_seen_late_is_still_the_cause(cluster_of: Clusters) -> None:
    """On a busy machine a peer may report the broken connection long before the system reports the death."""

    def talk() -> None:
        if md.rank() == 0:
            raise RuntimeError(f"broken connection{FOLLOWS}")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(md.RankDied, match=r"rank 1 was killed by SIGKILL.*\(then rank 0 failed too\)"):
        cluster_of(2).run(talk)


FOREVER = """
    import os, time
    import minidist as md

    def forever():
        print(os.getpid(), flush=True)
        while True:
            time.sleep(0.01)

    md.launch(forever, ranks=RANKS, timeout=None)
"""


@pytest.mark.parametrize(
    ("number", "method"),
    [
        (signal.SIGKILL, "fork"),
        (signal.SIGINT, "spawn"),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in [
                (signal.SIGKILL, "spawn"),
                (signal.SIGTERM, "fork"),
                (signal.SIGTERM, "spawn"),
                (signal.SIGINT, "fork"),
            ]
        ),
    ],
)
def test_no_process_outlives_the_caller(tmp_path: Path, method: str, number: signal.Signals) -> None:
    count = 2 if method == "fork" else 1  # each would import torch
    text = FOREVER.replace("RANKS", str(count))
    with program(tmp_path, text, MINIDIST_START_METHOD=method) as caller:
        ranks = [int(caller.stdout.readline().split()[-1]) for _ in range(count)]
        left = {*ranks, *descendants(caller.pid)}
        assert len(left) == 1 + count, "the supervisor and the ranks"
        caller.send_signal(number)
        caller.wait(HANG)
        wait_until_gone(sorted(left))
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in caller.stderr.read()


@pytest.mark.deep
def test_ctrl_c_while_a_finished_program_ends_shows_no_traceback(tmp_path: Path) -> None:
    """Planted: Ctrl-C as the program waits for its supervisor, with nothing left to do."""
    text = """
        import os, signal, subprocess
        import minidist as md

        md.launch(os.getpid, ranks=1)
        wait = subprocess.Popen.wait

        def interrupted(process, timeout):
            subprocess.Popen.wait = wait
            signal.raise_signal(signal.SIGINT)

        subprocess.Popen.wait = interrupted
        print("done", flush=True)
    """
    with program(tmp_path, text) as caller:
        out, err = caller.communicate(timeout=HANG)
    assert (caller.returncode, out, err) == (0, "done\n", "")


def test_a_forked_child_of_the_caller_does_not_keep_ranks(tmp_path: Path) -> None:
    """The child holds a copy of the caller's end of the control socket, so the socket does not end."""
    text = """
        import os, time
        import minidist as md
        cluster = md.Cluster(ranks=2)
        ranks = cluster.run(os.getpid)
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        print(child, *ranks, flush=True)
        cluster.run(time.sleep, 30)
    """
    with program(tmp_path, text, PYTHONWARNINGS="ignore") as caller:
        child, *ranks = map(int, caller.stdout.readline().split())
        caller.kill()
        caller.wait(HANG)
        try:
            wait_until_gone(ranks)
        finally:
            os.kill(child, signal.SIGKILL)


def test_no_rank_outlives_the_supervisor(tmp_path: Path) -> None:
    with program(tmp_path, FOREVER.replace("RANKS", "2")) as caller:
        ranks = [int(caller.stdout.readline().split()[-1]) for _ in range(2)]
        (supervisor,) = set(descendants(caller.pid)) - set(ranks)
        os.kill(supervisor, signal.SIGKILL)
        wait_until_gone(ranks)
        assert caller.wait(HANG) == 1
        assert "the process that starts and watches ranks was killed by SIGKILL\n" in caller.stderr.read()


def test_the_supervisor_outlives_sigterm() -> None:
    """A scheduler sends it to every process of a job, and ranks may have to save before they leave."""

    def signal_it() -> int:
        supervisor = os.getppid()
        os.kill(supervisor, signal.SIGTERM)
        time.sleep(0.2)
        return supervisor

    with md.Cluster(ranks=1) as cluster:
        (supervisor,) = cluster.run(signal_it)
        assert cluster.run(os.getppid) == md.launch(os.getppid, ranks=1) == [supervisor]


def test_what_a_rank_started_goes_with_it() -> None:
    def start_child() -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    with md.Cluster(ranks=1) as cluster:
        (child,) = cluster.run(start_child)
        assert alive(child)
    wait_until_gone([child])


def test_a_script_needs_no_main_guard_no_module_and_no_stream(tmp_path: Path) -> None:
    """All that a script may do without, in one, since each start of an interpreter imports torch."""
    (tmp_path / "helper.py").write_text("def twice(x): return 2 * x\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import gc, sys\n"
        "import minidist as md\n"
        "import helper\n"
        "scale = 3\n"
        "print(md.launch(lambda: helper.twice(md.rank()) * scale, ranks=2))\n"
        "print(md.launch(lambda: gc.isenabled() and 'wave' in sys.modules, ranks=2), 'wave' in sys.modules)\n"
        "md.launch(lambda: print('\u00e9\\u2028'), ranks=1)\n"
        "sys.stdout = None\n"
        "sys.stderr.write(str(md.launch(lambda: print('lost') or md.rank(), ranks=2)))\n",
        encoding="utf-8",
    )
    done = run_as_users_do(script, MINIDIST_PRELOAD="wave, no_such_module", PYTHONIOENCODING="ascii")
    there, preloaded, escaped = done.stdout.splitlines()
    assert there == "[0, 6]"
    assert preloaded == "[True, True] False"
    assert escaped == "[rank 0] \\xe9\\u2028"  # what the encoding lacks
    assert done.stderr.count("MINIDIST_PRELOAD names 'no_such_module', which cannot be imported") == 1
    assert done.stderr.endswith("\n[0, 1]")  # also with no standard output


def test_the_supervisor_frees_what_it_has_imported(tmp_path: Path) -> None:
    """A library may report what is left at exit as leaks."""
    (tmp_path / "keeper.py").write_text(
        textwrap.dedent(f"""
        import os

        class Kept:
            def __init__(self):
                self.itself, self.file = self, os.open({str(tmp_path / "freed")!r}, os.O_CREAT | os.O_WRONLY)

            def __del__(self, write=os.write):
                write(self.file, b"freed")

        kept = Kept()
        """)
    )
    script = written(tmp_path, "import minidist as md\nprint(md.launch(int, 1))\n")
    done = run_as_users_do(script, MINIDIST_PRELOAD="keeper")
    assert done.stdout == "[0]\n", done.stderr
    assert (tmp_path / "freed").read_text() == "freed"


@pytest.mark.parametrize(
    "context",
    ["spawn", *(pytest.param(each, marks=pytest.mark.deep) for each in ("fork", "forkserver"))],
)
def test_a_loaders_workers_know_the_classes_of_the_script(tmp_path: Path, context: str) -> None:
    """Rows of the script's own class travel to a worker, and back."""
    text = f"""
        import torch
        import minidist as md
        from torch.utils.data import DataLoader, Dataset

        class Row:
            def __init__(self, x):
                self.x = x

        class Squares(Dataset):
            def __len__(self):
                return 3

            def __getitem__(self, index):
                return Row(square(index))

        def square(x):
            return torch.tensor([x * x])

        def train():
            loader = DataLoader(
                Squares(), batch_size=2, num_workers=1, multiprocessing_context={context!r},
                collate_fn=lambda rows: Row(torch.cat([row.x for row in rows])),
            )
            return [(type(batch) is Row, batch.x.tolist()) for batch in loader]

        print(md.launch(train, ranks=1))
        """
    with program(tmp_path, text) as process:
        out, err = process.communicate(timeout=HANG)
    assert out == "[[(True, [0, 1]), (True, [4])]]\n", err


def test_the_package_is_found_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """In a folder that holds a clone, `import minidist` imports the package, not the clone's folder."""
    (tmp_path / "minidist").mkdir()
    code = "import minidist; print(minidist.__version__)"
    assert output_of(code, folder=tmp_path) == md.__version__


def test_ranks_that_cannot_meet_are_not_started() -> None:
    """Planted: with the interface lo down, they tried for minutes and printed traces of C++.

    A new network namespace has lo, and it is down.
    """
    inside = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    text = "import minidist as md, os\nmd.launch(os.getpid, 2)"
    done = subprocess.run([*inside, sys.executable, "-c", text], capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert re.match(r"ConnectionError: .* meet at 127.0.0.1, which cannot be reached .* lo up$", last)
