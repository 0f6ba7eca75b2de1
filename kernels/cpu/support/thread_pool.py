"""Worker threads that find their work on a board, in compiled code without the GIL (`nogil`).

For some 0.3 ms after a product a worker watches the board (`board.py`), because the next product often
follows at once and waking up takes longer than a small product. Then it sleeps until a caller wakes it.
A caller waits for no worker to arrive: it multiplies the parts that no worker takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from ...rung import empty

LINE = 8  # words of the board in a cache line; each counter has a line of its own
BELL, DOOR, OPEN, PACKED, TAKEN, NUMBERS = range(0, 6 * LINE, LINE)  # words of the board
ELEMENT = NUMBERS + 15  # bytes of an element of the product on the board; its key in HELP
SEATS = ELEMENT + 1  # threads that its parts suffice for
PATIENCE = 1_000_000  # looks at a counter, of a cycle or two each: some 0.3 ms

# By ELEMENT, what a worker calls for such a product: see `serve`. A rung adds its own.
HELP: dict[int, Callable[[int], int]] = {}

board = empty(1, NUMBERS + 4 * LINE, np.int64)[0]
board[:] = 0

_posting = threading.Lock()  # held by the one thread whose product is on the board
_inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
_workers: dict[int, frozenset[int]] = {}  # the CPUs that each may run on, by the worker's system thread id
_callers_cpu = -1  # that workers were told to keep off
_others: frozenset[int] = frozenset()  # the CPUs that they were told to use instead
_asleep: list[None] = []  # one item for each worker that waits for the inbox; whoever wakes one takes it


@functools.cache
def threads() -> int:
    """Return how many threads compiled code may use: this process's cores, or NUMBA_NUM_THREADS.

    Numba reads that environment variable when it is imported; the launcher sets it for ranks on one machine.
    """
    from numba import config

    return int(config.NUMBA_NUM_THREADS)


@functools.cache
def address() -> int:
    """Return where the board begins."""
    return int(board.ctypes.data)


def latest() -> int:
    """Return the number of the product posted last, from 1; 0 if none was."""
    return int(board[BELL])


def begin(helpers: int) -> bool:
    """Let this thread post products for so many workers until `end`; or return False if another one does."""
    if not _posting.acquire(blocking=False):
        return False
    try:
        # If no more threads can start (a limit, or the interpreter is ending), the present ones do the work.
        with contextlib.suppress(RuntimeError):
            while len(_workers) < helpers:
                _start_worker()
        _keep_off_this_cpu()
    except BaseException:
        _posting.release()
        raise
    return True


def serve() -> None:
    """Work in a worker for what is posted, until nothing is for a while.

    A rung's help for products after number `seen` returns 0 then, and -1 for a product of another ELEMENT.
    """
    while HELP[int(board[ELEMENT])](max(0, latest() - 1)):
        pass


def wake(helpers: int, serve: Callable[[], None]) -> None:
    """Have sleeping workers call serve(), until `helpers` are awake; serve returns when nothing is posted.

    It is called after posting. A worker that lies down after that finds the product by itself.
    """
    for _ in range(helpers - (len(_workers) - len(_asleep))):
        with contextlib.suppress(IndexError):  # that worker has just got up
            _asleep.pop()
            _inbox.put(serve)


def clear() -> None:
    """Take the product off the board, and wait until nobody works for it, even if interrupted.

    Workers write to memory that the caller will use again. The compiled code has closed the product and has
    waited for a while, unless an interrupt kept it from that.
    """

    def leave() -> None:
        if board[OPEN]:
            board[OPEN] = 0
            time.sleep(0)  # gives the GIL away: others see the store before the door is read
        while board[DOOR]:
            time.sleep(5e-5)

    _even_if_interrupted(leave)


def _even_if_interrupted(wait: Callable[[], None]) -> None:
    """Call wait() until it returns, and raise afterwards what interrupted it."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait()
            break
        except BaseException as stop:
            interrupt = stop
    if interrupt:
        raise interrupt


def end() -> None:
    """Clear the board, and let other threads post."""
    try:
        clear()
    finally:
        _posting.release()


def together(work: Callable[[], None], cores: int) -> None:
    """Call work() in this thread and in up to cores - 1 workers, for work of which each takes parts.

    It returns when all that have begun have ended, even if interrupted, and waits for no worker to begin: one
    that comes later does nothing. While another thread posts a product, this thread works alone. Raises what
    work() raises.
    """
    if cores < 2 or not begin(cores - 1):
        work()
        return
    state, inside, ended, errors = threading.Condition(), [0], [False], []

    def help(was_asleep: bool) -> None:
        if not was_asleep:  # it has watched the board until now, and has just lain down
            with contextlib.suppress(IndexError):
                _asleep.pop()
        with state:
            if ended[0]:
                return
            inside[0] += 1
        try:
            work()
        except Exception as error:  # the caller's to know: parts may be missing
            errors.append(error)
        finally:
            with state:
                inside[0] -= 1
                state.notify()

    def leave() -> None:
        with state:
            ended[0] = True
            while inside[0]:
                state.wait()

    try:
        for _ in range(min(cores - 1, len(_workers))):
            was_asleep = True
            try:
                _asleep.pop()
            except IndexError:
                was_asleep = False
            once = iter([functools.partial(help, was_asleep)])  # called again, it serves the board
            _inbox.put(lambda once=once: next(once, serve)())  # type: ignore[misc]
        work()
    finally:
        try:
            _even_if_interrupted(leave)
        finally:
            end()
    for error in errors:
        raise error


def _start_worker() -> None:
    """Start a thread that serves whenever it is woken; it ends with the process."""

    def work() -> None:
        serve = _inbox.get()
        while True:
            # If it fails, for lack of memory say, the others do its share.
            with contextlib.suppress(Exception):
                serve()
            _asleep.append(None)
            if board[OPEN] and -board[DOOR] < board[SEATS]:  # posted before this thread was seen to sleep
                with contextlib.suppress(IndexError):  # another thread has put serve into the inbox
                    _asleep.pop()
                    continue
            serve = _inbox.get()

    worker = threading.Thread(target=work, name="minidist-kernels", daemon=True)
    worker.start()
    assert worker.native_id is not None  # it has started
    _workers[worker.native_id] = frozenset()
    _asleep.append(None)


def _keep_off_this_cpu() -> None:
    """Let the workers run on any of this process's CPUs except the caller's.

    Linux likes to wake a thread on the CPU of the thread that woke it, which here goes on computing. Where it
    does not see that another CPU is idle (in many virtual machines), both share one CPU for milliseconds.
    """
    global _callers_cpu, _others
    getcpu = _sched_getcpu()
    if getcpu is None:
        return
    this_cpu = getcpu()
    if this_cpu == _callers_cpu and not _asleep:
        return  # a quick answer for small products: workers that are awake keep off it already
    _callers_cpu = this_cpu
    allowed = frozenset(os.sched_getaffinity(0))
    others = allowed - {this_cpu} or allowed
    # To compare two sets of 191 CPUs for each of 191 workers takes 0.15 ms: compare them once.
    _others = _others if others == _others else others
    for worker, cpus in list(_workers.items()):
        if cpus is not _others:
            with contextlib.suppress(OSError):  # forbidden here, or the thread has ended
                os.sched_setaffinity(worker, _others)
            _workers[worker] = _others


@functools.cache
def _sched_getcpu() -> Callable[[], int] | None:
    """The C library's function, where there is one."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    found: Callable[[], int] | None = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    return found


def _forget() -> None:
    """Threads don't survive a fork: the child starts its own, and what is on the board is the parent's."""
    global _inbox, _posting
    _inbox, _posting = SimpleQueue(), threading.Lock()
    _workers.clear()
    _asleep.clear()
    board[DOOR] = board[OPEN] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
