"""Run a task in several threads at once: compiled code without the GIL (`nogil`) runs on all cores.

A product of 64 x 4096 x 64 takes two cores 0.2 ms, and the futures of `concurrent.futures` cost a third of
that. This pool does one thing only: it lets threads take part in work that they share out among themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

_inbox: SimpleQueue[_Job] = SimpleQueue()
_bell = np.zeros(1, np.int64)  # counts the jobs, for workers that spin until the next one
_workers: dict[int, frozenset[int]] = {}  # the CPUs that each may run on, by the worker's system thread id
PATIENCE = 1_000_000  # looks at a counter, of a cycle or two each: some 0.3 ms


class _Job:
    """A task that its caller and workers call at the same time."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task
        self._changed = threading.Condition()
        self._open = True
        self._running = 0

    def take_part(self) -> None:
        """Call the task in a worker, unless the caller has closed the job."""
        with self._changed:
            if not self._open:
                return
            self._running += 1
        try:
            # If it fails, for lack of memory say, the others do its share.
            with contextlib.suppress(Exception):
                self._task()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def close(self, done: Callable[[], bool]) -> None:
        """Let no more workers begin; wait for the running ones, even if interrupted, unless all is done."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._open = False
                    if not done():
                        _bell[0] += 1  # makes calls return that wait for the next job
                        self._changed.wait_for(lambda: self._running == 0)
                break
            except BaseException as stop:
                interrupt = stop
        if interrupt:
            raise interrupt


def threads() -> int:
    """Return how many threads compiled code may use: this process's cores, or NUMBA_NUM_THREADS.

    Numba reads that environment variable when it is imported; the launcher sets it for ranks on one machine.
    """
    from numba import config

    return int(config.NUMBA_NUM_THREADS)


def bell() -> tuple[int, int]:
    """Return the address of the counter of jobs, and its value.

    The caller's own call of a task adds 1 to it once it is in compiled code. Workers that wait for it then
    find the GIL free: a thread that meets another one there is put to sleep, and waking up takes longer than
    multiplying. For the same reason a worker waits for the next job in compiled code.
    """
    return _bell.ctypes.data, int(_bell[0])


def run(task: Callable[[], None], count: int, done: Callable[[], bool]) -> None:
    """Call task() in this thread and, if they wake up in time, in count - 1 others.

    The calls share out the work among themselves, so when this thread's call returns nothing is left to take.
    `done` says whether all work taken is also finished. If not, `run` waits for the calls that have begun,
    also when this thread is interrupted, because they write to memory that its caller will use again. Calls
    that have not begun never will.
    """
    job = _Job(task)
    # If no more threads can start (a limit, or the interpreter is ending), the present ones do the work.
    with contextlib.suppress(RuntimeError):
        while len(_workers) < count - 1:
            _start_worker()
    _keep_off_this_cpu()
    try:
        for _ in range(count - 1):
            _inbox.put(job)
        task()
    finally:
        job.close(done)


def _start_worker() -> None:
    """Start a thread that takes part in every job; it ends with the process."""
    from . import atomic

    def work() -> None:
        while True:
            _inbox.get().take_part()
            # The next product often follows at once, and waking up can take longer than multiplying.
            jobs = int(_bell[0])
            if _inbox.empty():
                atomic.wait(_bell.ctypes.data, jobs + 1, PATIENCE)

    worker = threading.Thread(target=work, name="minidist-kernels", daemon=True)
    worker.start()
    assert worker.native_id is not None  # it has started
    _workers[worker.native_id] = frozenset()


def _keep_off_this_cpu() -> None:
    """Let the workers run on any of this process's CPUs except the caller's.

    Linux likes to wake a thread on the CPU of the thread that woke it, which here goes on computing. Where it
    does not see that another CPU is idle (in many virtual machines), both share one CPU for milliseconds.
    """
    this_cpu = _sched_getcpu()
    if this_cpu is None:
        return
    allowed = frozenset(os.sched_getaffinity(0))
    others = allowed - {this_cpu()} or allowed
    for worker, cpus in list(_workers.items()):
        if cpus != others:
            with contextlib.suppress(OSError):  # forbidden here, or the thread has ended
                os.sched_setaffinity(worker, others)
            _workers[worker] = others


@functools.cache
def _sched_getcpu() -> Callable[[], int] | None:
    """The C library's function, where there is one."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    found: Callable[[], int] | None = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    return found


def _forget() -> None:
    """Threads don't survive a fork: the child starts its own, and the jobs in the inbox are the parent's."""
    global _inbox
    _inbox = SimpleQueue()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
