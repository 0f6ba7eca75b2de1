"""Threads that wait for each other outside of barriers: flags, blocks of a grid; and who waits in vain."""

import numpy as np
import pytest
from numba import cuda

from minidist.kernels.emulator import Fault, launch


def test_a_block_waits_for_a_flag_that_a_later_block_sets():
    @cuda.jit
    def chain(flags, x):
        block = cuda.blockIdx.x
        if cuda.threadIdx.x == 0:
            if block + 1 < cuda.gridDim.x:
                while cuda.atomic.add(flags, block + 1, 0) == 0:
                    pass
                cuda.threadfence()
                x[block] = x[block + 1] + 1
            else:
                x[block] = 1
            cuda.threadfence()
            cuda.atomic.add(flags, block, 1)

    flags, x = np.zeros(40, np.int32), np.zeros(40, np.int32)
    launch(chain, 40, 256, flags, x)
    np.testing.assert_array_equal(x, np.arange(40, 0, -1))


def test_a_flag_that_nobody_sets_is_a_deadlock_and_not_an_endless_loop():
    @cuda.jit
    def in_vain(flag):
        while cuda.atomic.add(flag, 0, 0) == 0:
            pass

    with pytest.raises(Fault, match="for ever") as caught:
        launch(in_vain, 2, 32, np.zeros(1, np.int32))
    assert caught.value.kind == "deadlock"


def test_a_barrier_of_the_whole_grid():
    @cuda.jit
    def reversed_by_blocks(x, y):
        i = cuda.grid(1)
        x[i] = i
        cuda.cg.this_grid().sync()
        y[i] = x[x.size - 1 - i]

    x, y = np.zeros(128 * 8, np.int32), np.zeros(128 * 8, np.int32)
    launch(reversed_by_blocks, 8, 128, x, y)
    np.testing.assert_array_equal(y, np.arange(128 * 8)[::-1])
