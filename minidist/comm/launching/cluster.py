"""`Cluster`: local ranks that have imported torch, formed a world, and wait for functions to run.

`Cluster.run` sends a function to every rank and returns what each of them returned.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any

from minidist._arguments import check_seconds, check_whole, is_whole
from minidist.comm.errors import RankError
from minidist.comm.launching.collect_results import collect
from minidist.comm.launching.cores import available_cores as available_cores
from minidist.comm.launching.rank_processes import RankProcess, stop, supervisor
from minidist.comm.launching.sending import Kept, WithSource, keep, pickle_call, unpickle_result
from minidist.comm.launching.worker import Setup
from minidist.comm.started_by import without_launcher

START_TIMEOUT = 120.0
"""Seconds that ranks may take to start. Importing torch from a cold disk can take most of a minute."""
COLLECTIVE_TIMEOUT = 300.0
"""Seconds that a collective waits if the run has no time limit."""
COLLECTIVE_MARGIN = 5.0
"""Seconds that a collective waits beyond the run's limit. The run's error comes first, since it says where
each rank is."""
_REPLACED = """fresh processes replace the ranks, and what they kept is gone, because their last run caught an
error that left them out of step: {}"""


class Cluster:
    """Local ranks that stay up between runs.

    >>> with md.Cluster(ranks=4) as cluster:
    ...     cluster.run(lambda: md.rank() ** 2)
    [0, 1, 4, 9]

    What a rank prints appears in the caller, line by line, labelled with the rank. Ctrl-C stops all ranks.
    `keep` leaves an object on the ranks for later runs. After a failed run the cluster starts fresh
    processes; what the old ones held is gone. It also does so, with a RuntimeWarning, after a run in which a
    rank caught the CollectiveError of a call that had begun. Ranks never outlive the caller, however it ends.

    Args:
        ranks: number of processes, at least 1.
        timeout: seconds that a run may take. None sets no limit, and gives each collective 300 s.
        threads: threads of each rank in torch, BLAS and Numba; by default the cores divided by the ranks, at
            least 1.
        start_timeout: seconds that the ranks may take to start.
        check: compare every call of the communication API with the other ranks' calls before it begins. A
            mismatch is then an error on all ranks that names both calls; see `minidist.comm.checking`.
        may_fail: ranks whose failure does not stop the others.

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
        check_whole("ranks", ranks, 1)
        self.ranks = ranks
        self.threads = max(1, available_cores() // ranks) if threads is None else threads
        check_whole("threads", self.threads, 1)
        self.timeout = (
            None if timeout is None else check_seconds("timeout", timeout, ", or None for no limit")
        )
        self.start_timeout = check_seconds("start_timeout", start_timeout)
        if not isinstance(check, bool):
            raise TypeError(f"check is {check!r}; give True or False")
        self.check = check
        self.may_fail = _check_ranks("may_fail", may_fail, ranks)
        if check and self.may_fail:
            raise ValueError(
                f"check=True compares every rank's calls, and may_fail names ranks {sorted(self.may_fail)}, "
                "which may make none; give one of the two"
            )
        self._owner = os.getpid()
        self._running = threading.Lock()
        self._caught = ""  # the error of a call that failed halfway, which the last run caught
        self._held = set[int]()  # keys of what the ranks keep
        self._forgotten: list[int] = []  # keys whose handles are gone; the next run tells the ranks
        # The finalizer holds this very list, so it is emptied and filled, never replaced.
        self._processes: list[RankProcess] = []
        self._stop = partial(stop, self._processes, self._owner)
        self._finalizer = weakref.finalize(self, self._stop, 0.0)
        self._start()
        self.closed = False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank.

        Returns:
            What each rank returned, in rank order. A rank of `may_fail` that failed has its RankError or
            RankDied there; the next run then has fresh processes.

        Raises:
            RankError: a rank raised an exception. Names the first one that did, with its traceback.
            RankDied: a rank's process ended: killed, or out of memory.
            RankTimeout: a rank had not returned in time. Says where each such rank was.
            TypeError: the function or an argument cannot be sent to another process.
            RuntimeError: the cluster is closed, is running a function in another thread, or belongs to the
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
        forgotten = [*self._forgotten]
        call = pickle_call(function, args, kwargs, self._held, forgotten)
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this Cluster is running another function; wait for it, or make a second one")
        del self._forgotten[: len(forgotten)]
        whole = False
        try:
            if not self._processes:  # the last run failed
                self._start()
                if self._caught:
                    warnings.warn(_REPLACED.format(self._caught), RuntimeWarning, stacklevel=2)
            self._caught = ""
            for process in self._processes:
                process.channel.send(call)
            values = collect(self._processes, "returned", self.timeout, "timeout", self.may_fail)
            self._caught = next((each.caught for each in values if getattr(each, "caught", "")), "")
            whole = not (self._caught or any(isinstance(value, RankError) for value in values))
        except RankError as error:
            if self.closed:
                raise RuntimeError("this Cluster was closed while it ran a function") from error
            raise
        finally:
            if self.closed or not whole:
                self._stop(0.0)
                self._held.clear()
            self._running.release()
        return [unpickle_result(rank, getattr(value, "value", value)) for rank, value in enumerate(values)]

    def keep(self, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Kept:
        """Run `make(*args, **kwargs)` on every rank, as `run` does, and leave what it returns there.

        >>> engine = cluster.keep(make_engine, layout)
        >>> losses = [cluster.run(step, engine, batch) for batch in batches]

        Returns:
            A handle. In an argument of `run`, or a variable that its function uses, each rank finds its own
            object. Ranks free it at the next run after the handle is gone, and lose it if a run fails.
        """
        handle = Kept(make)
        for value in self.run(keep, handle.key, make, *args, **kwargs):
            if isinstance(value, RankError):
                raise value
        self._held.add(handle.key)
        weakref.finalize(handle, self._forgotten.append, handle.key).atexit = False
        return handle

    def signal(self, number: int) -> None:
        """Send a signal to every rank. Works during a run, for example from a signal handler."""
        for process in self._processes:
            process.signal(number)

    def close(self) -> None:
        """Stop the ranks. A run in another thread ends with an error; a second call does nothing."""
        self.closed = True
        if self._running.acquire(blocking=False):
            self._stop(1.0)
            self._running.release()
        elif os.getpid() == self._owner:
            for process in self._processes:  # the run sees them end and cleans up
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
        # The caller opens the listening socket of the world's store and hands it to rank 0. So no port has to
        # be guessed, and only this machine can reach it.
        _check_loopback()
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
                environment=without_launcher(dict(os.environ)),
                directory=os.getcwd(),
                path=[entry for entry in sys.path if isinstance(entry, str)],
            )
            starter = supervisor()
            try:
                for rank in range(self.ranks):
                    process = RankProcess(rank, starter, listener if rank == 0 else None)
                    self._processes.append(process)
                    process.channel.send(pickle.dumps(setup._replace(rank=rank)))
                collect(self._processes, "ready", self.start_timeout, "start_timeout")
            except BaseException:
                self._stop(0.0)
                raise


def _check_ranks(name: str, value: Iterable[int], ranks: int) -> frozenset[int]:
    """Return the ranks that `value` names; raise an error unless all are ranks of the cluster."""
    given = tuple(value) if isinstance(value, Iterable) else value
    if not isinstance(given, tuple) or not all(map(is_whole, given)):
        raise TypeError(f"{name} is {given!r}; give ranks, such as (1, 2)")
    if not set(given) <= set(range(ranks)):
        raise ValueError(f"{name} is {given}; the ranks are 0 to {ranks - 1}: give some of them")
    return frozenset(given)


def _check_loopback() -> None:
    """Raise ConnectionError if 127.0.0.1 cannot be reached: ranks would try for minutes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("127.0.0.1", 9))  # looks up the way, and sends nothing
        except OSError as error:
            raise ConnectionError(
                error.errno,
                f"ranks of one machine meet at 127.0.0.1, which cannot be reached ({error.strerror}): the "
                "interface lo may be down; ip link set lo up",
            ) from None
