"""The board: arrays come back as they were written, and who may work for a product."""

import functools
import threading
import time

import numpy as np
import pytest
from numba import njit, types

from minidist.kernels.cpu.support import board as module
from minidist.kernels.cpu.support import thread_pool
from tests.helpers.products import every_layout, laid_out


@functools.cache
def compiled():
    matrix = types.Array(types.float64, 2, "A")

    @njit(types.void(types.intp, matrix, matrix, matrix, types.intp))
    def post(at, a, b, out, seats):
        module.post(at, a, b, out, 0, seats, (1, 1, 1), 0, 0)

    @njit(types.intp(types.intp, types.intp, types.intp, types.boolean, types.intp), nogil=True)
    def join(at, seen, element, leads, patience):
        return module.join(at, seen, element, leads, patience)

    @njit(types.void(types.intp, matrix, types.intp))
    def copy(at, to, place):
        array = module.array(at, place, to)
        for i in range(to.shape[0]):
            for j in range(to.shape[1]):  # Numba compiles to[...] = array three seconds longer
                to[i, j] = array[i, j]

    return post, join, copy


@pytest.fixture
def board():
    """A board of one's own: the pool's workers do not see it."""
    words = np.zeros(thread_pool.board.size + thread_pool.LINE, np.int64)
    return words[-words.ctypes.data % 64 // 8 :][: thread_pool.board.size]


@every_layout
def test_arrays_come_back_with_their_strides(board, layout):
    post, _, copy = compiled()
    rng = np.random.default_rng()
    arrays = [laid_out(rng.standard_normal(shape), layout)[0] for shape in ((3, 4), (4, 5), (3, 5))]
    post(board.ctypes.data, *arrays, 1)
    for place, array in enumerate(arrays):
        back = np.empty(array.shape)
        copy(board.ctypes.data, back, place)
        np.testing.assert_array_equal(back, array)


def test_as_many_join_as_there_are_seats_and_none_after_the_end(board):
    post, join, _ = compiled()
    at, x = board.ctypes.data, np.ones((2, 2))
    assert join(at, 0, 8, False, 1000) == 0  # nothing is posted
    post(at, x, x, x, 2)
    assert join(at, 0, 4, False, 1000) == -1  # its elements have 8 bytes
    assert board[thread_pool.DOOR] == 0
    assert [join(at, 0, 8, False, 1000) for _ in range(4)] == [1, 1, 0, 0]
    assert join(at, 0, 8, True, 1000) == 1  # whoever posted it needs no seat
    assert board[thread_pool.DOOR] == -3
    board[thread_pool.DOOR] = 0
    module.close(at, 1000)
    assert join(at, 0, 8, False, 1000) == 0
    assert board[thread_pool.DOOR] == 0
    post(at, x, x, x, 2)
    assert join(at, 1, 8, False, 1000) == 2


def test_a_thread_for_which_no_product_has_a_seat_falls_asleep(board):
    """However many follow each other: each of them would have it look for as long again."""
    post, join, _ = compiled()
    at, x, joined = board.ctypes.data, np.ones((2, 2)), []
    worker = threading.Thread(target=lambda: joined.append(join(at, 0, 8, False, 3_000_000)))
    worker.start()
    deadline = time.monotonic() + 10
    while worker.is_alive() and time.monotonic() < deadline:
        post(at, x, x, x, 0)
    slept = not worker.is_alive()
    worker.join(timeout=20)
    assert slept
    assert joined == [0]


def test_each_part_is_dealt_once_first_ones_to_the_thread_that_leads(board):
    leads = [True, False, True, False, False, True, False, True]
    assert [module.take(board.ctypes.data, 5, each) for each in leads] == [0, 4, 1, 3, 2, -1, -1, -1]
