"""The pool: who is woken, what is waited for, and what becomes of errors, forks and the end."""

import os
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from minidist.kernels.cpu.support import thread_pool
from tests.helpers.clocks import HANG, until
from tests.helpers.fresh_python import output_of


@pytest.fixture(autouse=True)
def fresh_pool(monkeypatch):
    """A pool without workers at first; those that a test starts take part in no other test."""
    inbox, ended = SimpleQueue(), []
    monkeypatch.setattr(thread_pool, "_inbox", inbox)
    monkeypatch.setattr(thread_pool, "_workers", {})
    monkeypatch.setattr(thread_pool, "_asleep", [])
    yield
    count = len(thread_pool._workers)
    for _ in range(count):
        inbox.put(lambda: (ended.append(1), threading.Event().wait()))
    assert until(lambda: len(ended) == count)


def fail(error):
    raise error


def naps(monkeypatch, *actions):
    """The pool's waits: in each, one of these happens."""
    left = iter(actions)
    monkeypatch.setattr(thread_pool, "time", SimpleNamespace(sleep=lambda seconds: next(left)()))


def begin(helpers, serve):
    """Begin, and wake workers."""
    if not thread_pool.begin(helpers):
        return False
    thread_pool.wake(helpers, serve)
    return True


def post(helpers, serve):
    """One product: begin, and end once `helpers` workers sleep again."""
    assert begin(helpers, serve)
    thread_pool.end()
    assert until(lambda: len(thread_pool._asleep) == len(thread_pool._workers))


def test_workers_serve_beside_the_caller_and_at_the_same_time():
    together, served = threading.Barrier(3), []

    def serve():
        together.wait(HANG)
        served.append(threading.get_ident())

    assert begin(2, serve)
    together.wait(HANG)
    thread_pool.end()
    assert until(lambda: len(set(served)) == 2)
    assert threading.get_ident() not in served


def test_there_are_never_more_workers_than_the_largest_count_asks_for():
    before = threading.active_count()
    for helpers in (1, 3, 2, 3):
        post(helpers, lambda: None)
    assert len(thread_pool._workers) == threading.active_count() - before == 3
    assert all(thread.daemon for thread in threading.enumerate() if thread.native_id in thread_pool._workers)


def test_a_worker_that_is_awake_is_not_woken_again():
    served, released = [], threading.Event()
    assert begin(1, lambda: (served.append(1), released.wait(HANG)))
    assert until(lambda: served)
    thread_pool.end()
    for _ in range(3):
        assert begin(1, lambda: served.append(2))
        thread_pool.end()
    released.set()
    assert until(lambda: thread_pool._asleep)
    assert served == [1]


def test_a_product_posted_while_a_worker_lies_down_is_not_missed():
    served, second = [], threading.Event()

    def serve():
        served.append(1)
        if len(served) == 1:
            thread_pool.board[thread_pool.SEATS] = 1
            thread_pool.board[thread_pool.OPEN] = 1  # posted now, by one who saw no worker asleep
        else:
            thread_pool.board[thread_pool.OPEN] = 0
            second.set()

    assert begin(1, serve)
    assert second.wait(HANG)
    thread_pool.end()
    assert until(lambda: len(thread_pool._asleep) == 1)


def test_a_worker_does_not_stay_awake_for_a_product_whose_seats_are_taken():
    served = []

    def serve():
        served.append(1)
        thread_pool.board[thread_pool.SEATS] = 2
        thread_pool.board[thread_pool.DOOR] = -2
        thread_pool.board[thread_pool.OPEN] = 1

    assert begin(1, serve)
    assert until(lambda: served and thread_pool._asleep)
    time.sleep(0.05)
    thread_pool.board[thread_pool.DOOR] = 0
    thread_pool.end()
    assert served == [1]


def test_with_many_workers_a_small_product_wakes_as_many_as_it_can_use():
    served, released = SimpleQueue(), threading.Event()
    assert thread_pool.begin(40)
    thread_pool.end()
    for _ in range(3):  # the next ones find the first one's workers awake
        assert begin(5, lambda: (served.put(1), released.wait(HANG)))
        thread_pool.end()
    assert until(lambda: served.qsize() == 5)
    time.sleep(0.05)
    assert (served.qsize(), len(thread_pool._asleep)) == (5, 35)
    released.set()
    assert until(lambda: len(thread_pool._asleep) == 40)


def test_191_workers_are_told_once_to_keep_off_the_callers_cpu(monkeypatch):
    told, cpu = [], [3]
    affinity = {
        "sched_getaffinity": lambda _: range(192),
        "sched_setaffinity": lambda worker, cpus: told.append(cpus),
    }
    for name, function in affinity.items():
        monkeypatch.setattr(os, name, function, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(thread_pool, "_workers", dict.fromkeys(range(191), frozenset()))
        patch.setattr(thread_pool, "_asleep", [None])
        patch.setattr(thread_pool, "_sched_getcpu", lambda: lambda: cpu[0])
        for name, before in (("_callers_cpu", -1), ("_others", frozenset())):
            patch.setattr(thread_pool, name, before)
        for cpu[0], count in ((3, 191), (3, 0), (4, 191), (4, 0)):
            told.clear()
            assert thread_pool.begin(0)
            thread_pool.end()
            assert told == [frozenset(range(192)) - {cpu[0]}] * count


def test_one_thread_posts_at_a_time():
    assert begin(0, lambda: None)
    others = []
    other = threading.Thread(target=lambda: others.append(begin(0, lambda: None)))
    other.start()
    other.join(HANG)
    thread_pool.end()
    assert others == [False]
    post(0, lambda: None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_beginning_that_fails_lets_others_post(error, monkeypatch):
    monkeypatch.setattr(thread_pool, "_start_worker", lambda: fail(error()))
    with pytest.raises(error):
        begin(1, lambda: None)
    post(0, lambda: None)


def test_a_workers_error_ends_nothing():
    for _ in range(3):
        post(1, lambda: fail(MemoryError()))
    assert len(thread_pool._workers) == 1


def test_the_end_closes_the_product_and_waits_for_those_inside(monkeypatch):
    assert begin(0, lambda: None)
    thread_pool.board[thread_pool.OPEN], thread_pool.board[thread_pool.DOOR] = 7, -1
    left = []

    def leave():
        left.append(int(thread_pool.board[thread_pool.OPEN]))
        thread_pool.board[thread_pool.DOOR] = 0

    naps(monkeypatch, bool, bool, leave)
    thread_pool.end()
    assert left == [0]


def test_ctrl_c_during_the_wait_does_not_end_the_wait(monkeypatch):
    """It arrives afterwards: until then a worker writes to memory that the caller would use again."""
    assert begin(0, lambda: None)
    board = thread_pool.board
    board[thread_pool.DOOR] = -1
    naps(
        monkeypatch,
        bool,
        lambda: fail(KeyboardInterrupt()),
        bool,
        lambda: board.__setitem__(thread_pool.DOOR, 0),
    )
    with pytest.raises(KeyboardInterrupt):
        thread_pool.end()
    assert board[thread_pool.DOOR] == 0
    assert begin(0, lambda: None)  # others may post
    thread_pool.end()


def test_workers_do_not_keep_the_process():
    code = """
import threading, time
from minidist.kernels.cpu.support import thread_pool as pool
begun = threading.Event()
pool.begin(2)
pool.wake(2, lambda: (begun.set(), time.sleep(3600)))
begun.wait()
pool.end()
print(threading.active_count())
"""
    assert int(output_of(code)) >= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_a_child_starts_workers_of_its_own():
    """Also one forked while a product was on the board."""
    code = """
import os, threading, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
from minidist.kernels.cpu.support import thread_pool as pool
def meet():
    both = threading.Barrier(2)
    assert pool.begin(1)
    pool.wake(1, both.wait)
    both.wait()
    pool.end()
meet()
assert pool.begin(0)
pool.board[pool.DOOR] = -1
child = os.fork()
if child == 0:
    assert not pool._workers
    assert not pool._asleep
    meet()
    os._exit(7 if len(pool._workers) == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert output_of(code) == "7"


def test_work_is_done_together_and_an_error_of_a_worker_is_the_callers():
    met, ran = threading.Barrier(3), []

    def work():
        met.wait(HANG)
        ran.append(threading.get_ident())

    thread_pool.together(work, 3)
    assert len({*ran}) == 3
    assert until(lambda: len(thread_pool._asleep) == 2)
    mine = threading.get_ident()

    def fails_elsewhere():
        met.wait(HANG)
        if threading.get_ident() != mine:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        thread_pool.together(fails_elsewhere, 3)
    assert until(lambda: len(thread_pool._asleep) == 2)


def test_work_waits_for_no_worker_that_comes_late_nor_for_another_threads_product():
    ran, go = [], threading.Event()
    post(1, go.set)  # starts a worker
    thread_pool._asleep.clear()  # it watches the board, as after a product
    thread_pool._inbox.put(lambda: go.wait(HANG))
    go.clear()
    thread_pool.together(lambda: ran.append(threading.get_ident()), 2)
    assert ran == [threading.get_ident()]
    go.set()  # now it finds the work, which has ended, and lies down
    assert until(lambda: thread_pool._inbox.empty() and len(thread_pool._asleep) == 1)
    assert ran == [threading.get_ident()]
    assert thread_pool.begin(0)
    try:
        thread_pool.together(lambda: ran.append(0), 2)  # alone: this thread's own product is on the board
    finally:
        thread_pool.end()
    assert ran[1:] == [0]


def test_ctrl_c_while_others_work_does_not_end_the_wait_for_them(monkeypatch):
    met, go, wrote, waits, mine = threading.Barrier(2), threading.Event(), [], [], threading.get_ident()

    class Interrupted(threading.Condition):
        def wait(self):
            waits.append(1)
            if len(waits) == 1:
                raise KeyboardInterrupt
            go.set()
            return super().wait(HANG)

    def work():
        met.wait(HANG)
        if threading.get_ident() != mine:
            go.wait(HANG)
            wrote.append(1)

    stand_in = SimpleNamespace(Condition=Interrupted, Thread=threading.Thread)
    monkeypatch.setattr(thread_pool, "threading", stand_in)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread_pool.together(work, 2)
        assert wrote == [1]
    finally:
        go.set()
    post(0, lambda: None)  # others may post


def test_a_worker_that_has_worked_serves_products_again(monkeypatch):
    """It calls what it was woken with once more, if a product is there before it was seen to sleep."""
    put, calls = [], []
    stand_ins = {
        "_inbox": SimpleNamespace(put=put.append),
        "_workers": {1: frozenset()},
        "begin": lambda helpers: True,
        "end": lambda: None,
        "serve": lambda: calls.append("board"),
    }
    with monkeypatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setattr(thread_pool, name, stand_in)
        thread_pool.together(lambda: calls.append("work"), 2)
        (woken,) = put
        for _ in range(3):
            woken()
    assert calls == ["work", "board", "board"]
