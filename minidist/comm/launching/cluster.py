"""A cluster of warm local ranks: processes that have imported torch, formed a world and wait for functions.

`Cluster.run` sends a function to every rank and brings back what each returned. Functions travel by
cloudpickle, by value where no other process could import them, so those defined in a notebook cell, in a
script or inside another function work too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any

import cloudpickle

from minidist.comm.errors import RankError
from minidist.comm.launching.collect_results import collect
from minidist.comm.launching.cores import available_cores as available_cores
from minidist.comm.launching.notebook_sources import WithSource
from minidist.comm.launching.rank_processes import RankProcess, supervisor
from minidist.comm.launching.worker import Setup

START_TIMEOUT = 120.0
"""Seconds that ranks may take to start: importing torch from a cold disk can take most of a minute."""
COLLECTIVE_TIMEOUT = 300.0
"""Seconds that a collective waits where a run has no time limit of its own."""
COLLECTIVE_MARGIN = 5.0
"""Seconds that a collective waits beyond a run's own limit, which comes first and says where each rank is."""
KILL_TIMEOUT = 3.0
"""Seconds that the supervisor gets to kill ranks before they are killed without it."""
LONGEST_TIMEOUT = 1e6
"""Seconds: clocks of the libraries below overflow not far beyond."""


class Cluster:
    """Local ranks that stay up between runs.

    >>> with md.Cluster(ranks=4) as cluster:
    ...     cluster.run(lambda: md.rank() ** 2)
    [0, 1, 4, 9]

    What a rank prints appears in the caller, a line at a time, labelled with its rank. Ctrl-C stops them all.
    After a failed run the cluster is usable again, with fresh processes: what the old ones held is gone.
    Ranks never outlive the caller, however it ends.

    Args:
        ranks: number of processes, at least 1.
        timeout: seconds that a run may take; None for no limit, and 300 s for each of its collectives.
        threads: each rank's threads in torch, BLAS and Numba; by default the cores divided by the ranks, at
            least 1.
        start_timeout: seconds that the ranks may take to start.
        check: compare every call through the door with the other ranks' before it begins, so that a mismatch
            is an error on all ranks that names both; see `minidist.comm.checking.compare_calls`.
        may_fail: ranks whose failure does not stop the others, for functions that can do without them.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        ranks: int,
        timeout: float | None = 60.0,
        check: bool = False,
        *,
        threads: int | None = None,
        start_timeout: float = START_TIMEOUT,
        may_fail: Iterable[int] = (),
    ) -> None:
        self.closed = True
        self.ranks = _count("ranks", ranks)
        share = max(1, available_cores() // self.ranks)
        self.threads = share if threads is None else _count("threads", threads)
        self.timeout = None if timeout is None else _seconds("timeout", timeout)
        self.start_timeout = _seconds("start_timeout", start_timeout)
        if not isinstance(check, bool):
            raise TypeError(f"check is {check!r}; give True or False")
        self.check = check
        self.may_fail = _members("may_fail", may_fail, self.ranks)
        if check and self.may_fail:
            raise ValueError(
                f"check=True compares every rank's calls, and may_fail names ranks {sorted(self.may_fail)}, "
                "which may make none; give one of the two"
            )
        self._owner = os.getpid()
        self._running = threading.Lock()
        # One list for the object's life: the finalizer stops what it holds at the end.
        self._processes: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, _stop, self._processes, os.getpid(), 0.0)
        self._start()
        self.closed = False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank.

        Returns:
            What each rank returned, in rank order. For a rank of `may_fail` that failed, the RankError or
            RankDied that says how; the next run then has fresh processes.

        Raises:
            RankError: a rank raised; names the first that did, with its traceback.
            RankDied: a rank's process ended: killed, or out of memory.
            RankTimeout: a rank had not returned in time; says where each one was.
            TypeError: the function, or an argument, cannot be sent to another process.
            RuntimeError: the cluster is closed, is running something in another thread, or belongs to the
                process that this one was forked from.
        """
        if self.closed:
            raise RuntimeError("this Cluster is closed; make a new one")
        if os.getpid() != self._owner:
            raise RuntimeError(
                "this Cluster belongs to the process that was forked; make a new one in the fork"
            )
        if self.check and callable(function):
            function = WithSource(function)
        call = _pickle_call(function, args, kwargs)
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this Cluster is running another function; wait for it, or make a second one")
        try:
            if not self._processes:  # the last run failed
                self._start()
            for process in self._processes:
                process.channel.send(call)
            values = collect(self._processes, "returned", self.timeout, "timeout", self.may_fail)
            if any(isinstance(value, RankError) for value in values):
                _stop(self._processes, os.getpid(), 0.0)
        except BaseException as error:
            _stop(self._processes, os.getpid(), 0.0)
            if self.closed and isinstance(error, RankError):
                raise RuntimeError("this Cluster was closed while it ran a function") from error
            raise
        finally:
            if self.closed:
                _stop(self._processes, os.getpid(), 0.0)
            self._running.release()
        return [_unpickle_result(rank, value) for rank, value in enumerate(values)]

    def signal(self, number: int) -> None:
        """Send a signal to every rank; also while they run a function, from a signal handler, say."""
        for process in self._processes:
            if process.process is not None and process.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.process, number)

    def close(self) -> None:
        """Stop the ranks. A second call does nothing; a run in another thread ends with an error."""
        self.closed = True
        if self._running.acquire(blocking=False):
            _stop(self._processes, os.getpid(), 1.0)
            self._running.release()
        elif os.getpid() == self._owner:
            for process in self._processes:  # the run sees them end, and clears up
                process.kill()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cluster(ranks={self.ranks}, threads={self.threads}, {'closed' if self.closed else 'open'})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Cluster cannot be sent to a rank; call cluster.run outside the function that it runs"
        )

    def _start(self) -> None:
        """Start the ranks and wait until they have formed a world."""
        # The listening socket of the world's store is made here and handed to rank 0: no port is guessed,
        # so none is in use, and nothing but this machine can reach it.
        with socket.create_server(("127.0.0.1", 0), backlog=max(16, self.ranks)) as listener:
            limit = COLLECTIVE_TIMEOUT if self.timeout is None else self.timeout + COLLECTIVE_MARGIN
            setup = Setup(
                rank=0,
                ranks=self.ranks,
                port=listener.getsockname()[1],
                threads=self.threads,
                timeout=limit,
                check=self.check,
                run_timeout=self.timeout,
                # A world of torchrun's that the caller belongs to is not the ranks' own.
                environment={k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")},
                directory=_directory(),
                path=[entry for entry in sys.path if isinstance(entry, str)],
            )
            starter = supervisor()
            try:
                for rank in range(self.ranks):
                    process = RankProcess(rank, starter, listener if rank == 0 else None)
                    self._processes.append(process)
                    process.channel.send(pickle.dumps(replace(setup, rank=rank)))
                collect(self._processes, "ready", self.start_timeout, "start_timeout")
            except BaseException:
                _stop(self._processes, os.getpid(), 0.0)
                raise


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed: the ranks work somewhere else, then
        return "/"


def _stop(processes: list[RankProcess], owner: int, grace: float) -> None:
    """Stop processes and empty the list: let them end by themselves for `grace` seconds, then kill them."""
    if os.getpid() != owner:  # a fork of the caller: the ranks are not its to stop
        return
    stopping, processes[:] = processes[:], []
    deadline = time.monotonic() + grace
    for process in stopping:
        process.channel.close()  # an idle rank ends by itself
    for process in stopping:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill()
    deadline = time.monotonic() + KILL_TIMEOUT
    for process in stopping:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill_without_help()
        process.close()


def _unpickle_result(rank: int, value: bytes | RankError) -> Any:
    if isinstance(value, RankError):
        return value
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RankError(
            f"rank {rank} returned what cannot be read in this process ({type(error).__name__}: {error}); "
            "return tensors, arrays or plain Python values",
            rank=rank,
        ) from error


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(function):
        raise TypeError(
            f"function is {function!r}, of type {type(function).__name__}; give the function itself, "
            "without calling it"
        )
    try:
        return bytes(cloudpickle.dumps((function, args, kwargs)))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} or one of its arguments cannot be sent to another process ({error}); "
            "create such objects inside the function"
        ) from error


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; give a whole number, at least 1")
    if value < 1:
        raise ValueError(f"{name} is {value}; give at least 1")
    return int(value)


def _members(name: str, value: Iterable[int], ranks: int) -> frozenset[int]:
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}; give ranks, such as (1, 2)")
    members = tuple(value)
    if not all(isinstance(rank, int) for rank in members):
        raise TypeError(f"{name} is {members}; give ranks, such as (1, 2)")
    if not set(members) <= set(range(ranks)):
        raise ValueError(f"{name} is {members}; the ranks are 0 to {ranks - 1}: give some of them")
    return frozenset(members)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; give a number of seconds")
    if not 0 < value <= LONGEST_TIMEOUT:
        none = ", or None for no limit" if name == "timeout" else ""
        raise ValueError(f"{name} is {value}; give seconds above 0 and up to {LONGEST_TIMEOUT:.0f}{none}")
    return float(value)
