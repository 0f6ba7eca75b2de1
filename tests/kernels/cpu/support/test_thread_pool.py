"""The pool: who calls a task, what is waited for, and what becomes of errors, forks and the end."""

import os
import signal
import subprocess
import sys
import threading
import time
from queue import SimpleQueue

import pytest

from minidist.kernels.cpu.support import thread_pool

LIMIT = 20  # seconds, for what takes milliseconds


class End:
    """A job that keeps the worker who takes it for good."""

    def __init__(self):
        self.taken = threading.Event()

    def take_part(self):
        self.taken.set()
        threading.Event().wait()


def workers():
    return [thread for thread in threading.enumerate() if thread.native_id in thread_pool._workers]


@pytest.fixture(autouse=True)
def fresh_pool(monkeypatch):
    """A pool without workers at first; those that a test starts take part in no other test."""
    monkeypatch.setattr(thread_pool, "_inbox", SimpleQueue())
    monkeypatch.setattr(thread_pool, "_workers", {})
    yield
    ends = [End() for _ in workers()]
    for end in ends:
        thread_pool._inbox.put(end)
    assert all(end.taken.wait(LIMIT) for end in ends)


class Meeting:
    """A task whose first call by a worker the caller waits for, and which then lasts until `released`."""

    def __init__(self, then=lambda: None):
        self.then, self.caller = then, threading.get_ident()
        self.begun, self.released, self.ended = (threading.Event() for _ in range(3))

    def __call__(self):
        if threading.get_ident() == self.caller:
            assert self.begun.wait(LIMIT)
            self.then()
        else:
            self.begun.set()
            assert self.released.wait(LIMIT)
            self.ended.set()


def later(action, seconds=0.1):
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def fail(error):
    raise error


def test_the_caller_and_its_workers_take_part_at_the_same_time():
    together = threading.Barrier(3)
    callers = set()

    def task():
        together.wait(LIMIT)
        callers.add(threading.get_ident())

    thread_pool.run(task, 3, done=lambda: False)
    assert len(callers) == 3
    assert threading.get_ident() in callers


def test_one_thread_needs_no_workers():
    calls = []
    thread_pool.run(lambda: calls.append(threading.get_ident()), 1, done=lambda: False)
    assert calls == [threading.get_ident()]
    assert not thread_pool._workers


def test_there_are_never_more_workers_than_the_largest_count_asks_for():
    before = threading.active_count()
    for count in (2, 4, 3, 1, 4):
        thread_pool.run(lambda: None, count, done=lambda: False)
    assert len(workers()) == threading.active_count() - before == 3
    assert all(worker.daemon for worker in workers())


def test_the_callers_error_arrives():
    with pytest.raises(RuntimeError, match="the caller's"):
        thread_pool.run(lambda: fail(RuntimeError("the caller's")), 1, done=lambda: False)


def test_a_workers_error_leaves_its_part_to_the_others_and_the_worker_goes_on():
    for _ in range(3):
        meeting = Meeting()
        meeting.released.wait = lambda _: fail(MemoryError())
        thread_pool.run(meeting, 2, done=lambda: False)
    assert len(workers()) == 1


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_calls_that_have_begun_are_waited_for(error):
    meeting = Meeting(lambda: fail(error) if error else None)
    later(meeting.released.set)
    if error:
        with pytest.raises(error):
            thread_pool.run(meeting, 2, done=lambda: False)
    else:
        thread_pool.run(meeting, 2, done=lambda: False)
    assert meeting.ended.is_set()


def test_where_all_is_done_nobody_is_waited_for_and_what_has_not_begun_never_does():
    meeting, calls = Meeting(), []
    thread_pool.run(meeting, 2, done=lambda: True)
    assert not meeting.ended.is_set()

    def late():
        calls.append(threading.get_ident())

    thread_pool.run(
        late, 2, done=lambda: False
    )  # the one worker is still busy: it has not begun, nor will it
    meeting.released.set()
    thread_pool.run(
        last := Meeting(lambda: last.released.set()), 2, done=lambda: False
    )  # past `late` in its inbox
    assert last.ended.is_set()
    assert calls == [threading.get_ident()]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timer signals")
def test_ctrl_c_during_the_wait_does_not_end_the_wait():
    """It arrives afterwards: until then a worker writes to memory that the caller would use again."""
    meeting = Meeting(lambda: signal.setitimer(signal.ITIMER_REAL, 0.05))
    before = signal.signal(signal.SIGALRM, lambda *_: fail(KeyboardInterrupt()))
    timer = later(meeting.released.set, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread_pool.run(meeting, 2, done=lambda: False)
        assert meeting.ended.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)
        timer.join()


def run_script(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT
    ).stdout


def test_workers_do_not_keep_the_process():
    code = """
import threading, time
from minidist.kernels.cpu.support import thread_pool as pool
begun = threading.Event()
caller = threading.get_ident()
pool.run(lambda: begun.wait() if threading.get_ident() == caller else (begun.set(), time.sleep(3600)),
         3, done=lambda: True)
print(threading.active_count())
"""
    start = time.perf_counter()
    assert int(run_script(code)) >= 2
    assert time.perf_counter() - start < LIMIT / 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_a_child_starts_workers_of_its_own():
    code = """
import os, threading, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
from minidist.kernels.cpu.support import thread_pool as pool
def meet():
    both = threading.Barrier(2)
    pool.run(lambda: both.wait(10), 2, done=lambda: False)
meet()
child = os.fork()
if child == 0:
    assert not pool._workers
    meet()
    os._exit(7 if len(pool._workers) == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
meet()
"""
    assert run_script(code).strip() == "7"
