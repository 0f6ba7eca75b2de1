"""Rung 7: the same bits as rung 6, whoever takes part, when, and how often."""

import contextlib
import threading
import time
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numba import njit

from minidist.kernels import rung
from minidist.kernels.cpu import s7_threads
from minidist.kernels.cpu.support import atomic, board, register_tile, thread_pool
from minidist.kernels.cpu.support.block_sizes import blocks
from minidist.kernels.measure import product_checks
from tests.helpers.clocks import HANG, until
from tests.helpers.products import LAYOUTS, check_laid_out, every_cache, guarded_blocks, with_caches

RUNG = rung(7)
MAIN = threading.main_thread()


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Both dtypes, so that no test waits for a compiler while it counts on threads that meet."""
    for dtype in ("float32", "float64"):
        with threads(2):
            RUNG.matmul(np.ones((8, 8), dtype), np.ones((8, 8), dtype))


@contextlib.contextmanager
def threads(count, **more):
    """A context in which rung 7 uses so many threads, however small the product; more: other constants.

    No worker is awake when it begins and ends: one with the memory for blocks of one size would go on to a
    product in blocks of another.
    """
    assert all_asleep()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_pool, "threads", lambda: count)
        patch.setattr(s7_threads, "LEAST_WORK", 1)
        for name, value in more.items():
            patch.setattr(s7_threads, name, value)
        yield
        assert all_asleep()


def all_asleep():
    return until(lambda: len(thread_pool._asleep) == len(thread_pool._workers))


def random_product(rng, largest=(120, 150, 200)):
    m, n, k = (int(size) for size in rng.integers(1, largest))
    return product_checks.inputs(m, n, k, rng.choice(["float32", "float64"]), int(rng.integers(2**32)))


def assert_same_bits(a, b, message=""):
    c = np.full((a.shape[0], b.shape[1]), np.nan, a.dtype)
    RUNG.matmul(a, b, out=c)
    np.testing.assert_array_equal(c, rung(6).matmul(a, b), err_msg=f"{a.shape} {b.shape} {a.dtype} {message}")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_any_number_of_threads_gives_the_bits_of_rung_6(count):
    rng = np.random.default_rng()
    with threads(count):
        for _ in range(25):
            a, b = random_product(rng)
            assert_same_bits(a, b)
        a, b = random_product(rng, (40, 100, 1700))
        assert_same_bits(a, b)
        product_checks.assert_product(RUNG.matmul(a, b), a, b)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_sizes_past_every_block_in_any_layout(data):
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    columns = register_tile.tile_columns(dtype)
    tiles = data.draw(st.integers(1, 3))
    m = data.draw(st.integers(1, 6 * tiles * register_tile.ROWS))
    n = data.draw(st.integers(1, 6 * columns))
    k = data.draw(st.sampled_from([1, 50, register_tile.DEPTH, register_tile.DEPTH + 1, 1600]))
    layouts = [data.draw(st.sampled_from(list(LAYOUTS))) for _ in range(3)]
    near = data.draw(st.sampled_from([0, 2**20]))  # whether small products are packed, too
    small = replace(
        blocks(np.dtype(dtype).char),
        tiles=tiles,
        near=near,
        far=near,
        memory=register_tile.ROWS * (columns + tiles * register_tile.PITCH),
    )
    shared = data.draw(st.sampled_from([1, 3 * columns * k * np.dtype(dtype).itemsize, 2**26]))
    with guarded_blocks(s7_threads, small), threads(data.draw(st.integers(2, 4)), SHARED=shared):
        check_laid_out(RUNG, (m, n, k), dtype, layouts, data.draw(st.integers(0, 2**32)))


def test_small_products_stay_in_one_thread(monkeypatch):
    monkeypatch.setattr(thread_pool, "threads", lambda: 4)
    helpers = []
    monkeypatch.setattr(thread_pool, "begin", lambda count: bool(helpers.append(count)))
    for m, count in [(1, None), (2 * s7_threads.LEAST_WORK // 10_000, 1), (10**4, 3)]:
        helpers.clear()
        a, b = product_checks.inputs(m, 100, 100, "float32", 1)
        assert_same_bits(a, b)
        assert helpers == ([count] if count else [])


@pytest.mark.parametrize(
    ("shape", "cores", "expected"),
    [
        ((64, 64, 64), 192, 1),
        ((128, 128, 128), 192, 6),
        ((1, 4096, 4096), 192, 21),
        ((4096, 8, 4096), 64, 59),
        ((512, 512, 512), 64, 59),
        ((2048, 2048, 2048), 64, 64),
        ((2048, 2048, 2048), 192, 192),
        ((4, 4, 10**9), 192, 1),
    ],
)
def test_a_product_takes_as_many_threads_as_pay(shape, cores, expected, monkeypatch):
    """On machines with 64 and 192 cores: waking a thread costs the caller as much as some multiply-adds."""
    begun = []
    monkeypatch.setattr(thread_pool, "threads", lambda: cores)
    monkeypatch.setattr(thread_pool, "begin", lambda helpers: bool(begun.append(helpers)))
    monkeypatch.setattr(s7_threads.one_thread, "compute", lambda a, b, out: None)
    monkeypatch.setattr(s7_threads, "blocks", lambda kind: replace(blocks(kind), rows=14, columns=32))
    (m, n, k), one = shape, np.ones(1, np.float32)
    as_large = np.lib.stride_tricks.as_strided
    s7_threads.compute(as_large(one, (m, k), (0, 0)), as_large(one, (k, n), (0, 0)), np.empty((m, n), "f"))
    assert [1 + helpers for helpers in begun] == ([expected] if expected > 1 else [])


def test_few_rows_and_few_columns_are_cut_too():
    rng = np.random.default_rng()
    for m, n, k in [
        (1, 700, 900),
        (2, 90, 800),
        (7, 4, 900),
        (3, 1, 800),
        (5, 50, 900),
        (700, 1, 900),
        (90, 5, 1700),
        (14, 700, 30),
        (1, 1, 5000),
    ]:
        for dtype in ("float32", "float64"):
            a, b = product_checks.inputs(m, n, k, dtype, int(rng.integers(2**32)))
            for count in (2, 3):
                with threads(count):
                    assert_same_bits(a, b)
                    assert_same_bits(np.asfortranarray(a), b)
                    assert_same_bits(a, np.asfortranarray(b))


@njit
def through_the_door(at, step):
    atomic.fetch_add(at + board.DOOR, step)


@every_cache
def test_a_strip_of_b_waits_until_nobody_works_for_the_one_before(l2, l3):
    """The board and the packed b are used again. A worker stopped inside comes out a little later."""
    rng = np.random.default_rng()
    # b is past the second cache: a smaller one is not packed.
    a, b = product_checks.inputs(60, 400 + l2 // 4 // 900, 900, "float32", int(rng.integers(2**32)))
    work, post, at = s7_threads._work, s7_threads._post, thread_pool.address()
    through_the_door(at, 0)
    timers, inside = [], []

    def slow(space, at, seen, leads):
        done = work(space, at, seen, leads)
        if leads:
            through_the_door(at, -1)
            out = threading.Timer(0.01, through_the_door, (at, 1))
            timers.append(out)
            out.start()
        return done

    def look(*product):
        inside.append(int(thread_pool.board[thread_pool.DOOR]))
        post(*product)

    shared = 3 * 900 * 4 * register_tile.tile_columns("float32")
    with with_caches(l2, l3), threads(2, SHARED=shared, _work=slow, _post=look):
        assert_same_bits(a, b)
    assert len(inside) > 3
    assert set(inside) == {0}
    for timer in timers:
        timer.join()


def test_large_products_in_strips_have_the_bits_of_rung_6():
    """Parts take longer than a thread watches, and the last strip is narrow."""
    a, b = product_checks.inputs(200, 2050, 4096, "float32", 1)
    with threads(2, SHARED=2**23):
        for _ in range(3):
            assert_same_bits(a, b)


def test_workers_take_part():
    """The caller begins when a worker has taken a part; workers take theirs from the back."""
    work, taken = s7_threads._work, thread_pool.board[thread_pool.TAKEN :]

    def late(space, at, seen, leads):
        assert not leads or until(lambda: taken[0] >= board.FROM_BACK)
        return work(space, at, seen, leads)

    with threads(2, _work=late):
        assert_same_bits(*product_checks.inputs(400, 400, 400, "float32", 1))


def test_products_back_to_back_never_see_each_others_b():
    """b's packed parts lie in the same memory each time: a thread late for one product must not write to the
    next one's."""
    rng = np.random.default_rng()
    with threads(3):
        for _ in range(40):
            a, b = random_product(rng, (100, 100, 300))
            for _ in range(20):
                b = rng.permutation(b)
                assert_same_bits(a, b)


def test_several_python_threads_multiply_at_once():
    wrong = []

    def multiply(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                assert_same_bits(*random_product(rng))
        except BaseException as error:
            wrong.append(error)

    with threads(3):
        callers = [threading.Thread(target=multiply, args=(seed,)) for seed in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=HANG)
        assert not any(caller.is_alive() for caller in callers)
    assert not wrong, wrong[0]


def in_workers(action):
    """`memory` as ever, but for what a worker does first."""
    memory = s7_threads.memory

    def changed(purpose, kind, elements):
        if threading.current_thread() is not MAIN:
            action()
        return memory(purpose, kind, elements)

    return changed


def test_workers_that_fail_leave_their_parts_to_the_others():
    failed = []

    def fail():
        failed.append(1)
        raise MemoryError

    rng = np.random.default_rng()
    with threads(3, memory=in_workers(fail)):
        for _ in range(100):
            assert_same_bits(*random_product(rng))
    assert failed


def test_workers_that_come_late_change_nothing():
    """Some come in the middle, some when the product is over and the next one has begun."""
    rng = np.random.default_rng()
    late = threading.local()

    def sleep():
        late.rng = getattr(late, "rng", None) or np.random.default_rng()
        time.sleep(late.rng.choice([0, 1e-4, 5e-4, 2e-3]))

    a, b = product_checks.inputs(200, 190, 210, "float32", 1)
    with threads(4, memory=in_workers(sleep)):
        for _ in range(100):
            b = rng.permutation(b)
            assert_same_bits(a, b)


def test_the_callers_error_leaves_the_pool_in_order():
    memory = s7_threads.memory

    def fail(purpose, kind, elements):
        if threading.current_thread() is MAIN and purpose == "product":
            raise MemoryError("the caller's")
        return memory(purpose, kind, elements)

    a, b = product_checks.inputs(200, 190, 210, "float32", 1)  # large enough for three threads
    for _ in range(10):
        with threads(3, memory=fail), pytest.raises(MemoryError, match="the caller's"):
            RUNG.matmul(a, b)
        with threads(3):
            assert_same_bits(a, b)


def test_a_worker_that_is_still_inside_is_waited_for():
    """With the compiled code replaced by what it does to the board: a worker stopped in the middle."""
    begun, ended = threading.Event(), threading.Event()

    def work(space, at, seen, leads):
        if leads:
            assert begun.wait(HANG)
        elif not begun.is_set():
            thread_pool.board[thread_pool.DOOR] -= 1
            begun.set()
            time.sleep(0.1)
            ended.set()
            thread_pool.board[thread_pool.DOOR] += 1
        return 0

    with threads(2, _work=work):
        RUNG.matmul(np.ones((50, 50)), np.ones((50, 50)))
    assert ended.is_set()


def test_a_lost_part_is_found():
    """A planted fault: the counter begins with the second part."""
    post = s7_threads._post

    def skip_one(*product):
        post(*product)
        thread_pool.board[thread_pool.TAKEN] += 1

    a, b = product_checks.inputs(100, 100, 100, "float32", 1)
    with threads(2):
        assert_same_bits(a, b)
    with threads(2, _post=skip_one), pytest.raises(AssertionError):
        assert_same_bits(a, b)
