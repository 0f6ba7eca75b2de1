"""What the emulator finds: each kernel does one thing that a GPU would not forgive, at a line that is marked.

Beside each stands the kernel as it should be, which must pass: a check that cries at everything is none.
"""

import inspect

import numpy as np
import pytest
from numba import cuda, float32, int32

from minidist.kernels.emulator import EmulatorError, Fault, launch
from tests.helpers.refusals import refuses

FULL = 0xFFFFFFFF


def fault_in(kind, says, kernel, grid, block, *args, **options):
    """Launch, and check the fault that the kernel must have, at its line marked `# here`."""
    with pytest.raises(Fault) as caught:
        launch(kernel, grid, block, *args, **options)
    lines, first = inspect.getsourcelines(kernel.py_func)
    marked = [first + i for i, line in enumerate(lines) if "# here" in line]
    file, _, line = caught.value.where.rpartition(":")
    assert file == __file__
    assert int(line) in marked
    assert caught.value.kind == kind
    assert says in str(caught.value)


def floats(n):
    return np.zeros(n, np.float32)


@cuda.jit
def no_guard(x):
    i = cuda.grid(1)
    x[i] = 1  # here


@cuda.jit
def guarded(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = 1


@pytest.mark.parametrize(("blocks", "n"), [(1, 63), (2, 100)])
def test_a_store_past_the_end_of_an_array_is_named(blocks, n):
    says = f"thread {n % 64} of block {n // 64} writes 4 bytes at byte {4 * n} of x"
    fault_in("out of bounds", says, no_guard, blocks, 64, floats(n))
    x = floats(n)
    launch(guarded, blocks, 64, x)
    np.testing.assert_array_equal(x, 1)


def test_a_load_before_the_start_of_an_array_is_named():
    @cuda.jit
    def left_neighbour(x, y):
        i = np.uint64(cuda.grid(1))
        y[i] = x[i - np.uint64(1)]  # here

    fault_in("out of bounds", "4 bytes before x", left_neighbour, 1, 32, floats(32), floats(32))


def test_a_read_only_array_is_not_written():
    x = floats(64)
    x.flags.writeable = False
    # Numba refuses to compile a store to an array whose type is read-only.
    with pytest.raises(Exception, match=r"[Cc]annot modify readonly|read-?only"):
        launch(guarded, 1, 64, x)


def test_a_store_past_the_end_of_shared_memory_is_named():
    @cuda.jit
    def past(x):
        tile = cuda.shared.array(32, float32)
        i = cuda.threadIdx.x
        tile[i + 1] = 1  # here
        x[i] = i

    fault_in("out of bounds", "of shared memory, of which the block has 128", past, 1, 32, floats(32))


def test_dynamic_shared_memory_has_the_size_of_the_launch():
    @cuda.jit
    def dynamic(x):
        tile = cuda.shared.array(0, float32)
        i = cuda.threadIdx.x
        tile[i] = i  # here
        cuda.syncthreads()
        x[i] = tile[x.size - 1 - i]

    x = floats(64)
    launch(dynamic, 1, 64, x, shared=256)
    np.testing.assert_array_equal(x, np.arange(64)[::-1])
    fault_in("out of bounds", "of shared memory", dynamic, 1, 64, x, shared=252)


def test_reading_shared_memory_that_nobody_wrote_is_found():
    @cuda.jit
    def unwritten(x):
        tile = cuda.shared.array(64, float32)
        i = cuda.threadIdx.x
        tile[i] = 1
        cuda.syncthreads()
        x[i] = tile[i + 32]  # here

    fault_in("unwritten shared memory", "that nobody wrote", unwritten, 1, 32, floats(32))


def neighbours(first_barrier, second_barrier):
    """A kernel that reverses the sums of neighbours, with or without each of its barriers."""

    @cuda.jit
    def kernel(x):
        tile = cuda.shared.array(128, float32)
        i = cuda.threadIdx.x
        tile[i] = x[i]
        if first_barrier:
            cuda.syncthreads()
        total = tile[i] + tile[127 - i]  # here
        if second_barrier:
            cuda.syncthreads()
        tile[i] = total  # here
        cuda.syncthreads()
        x[i] = tile[127 - i]

    return kernel


def test_each_barrier_that_is_left_out_is_a_race():
    x = np.arange(128, dtype=np.float32)
    launch(neighbours(True, True), 1, 128, x)
    np.testing.assert_array_equal(x, 127)
    fault_in("race", "reads shared memory that warp 3 wrote at", neighbours(False, True), 1, 128, x)
    fault_in("race", "reads at", neighbours(True, False), 1, 128, x)


def test_threads_that_write_different_values_to_one_place_race():
    @cuda.jit
    def all_to_one(x):
        x[0] = cuda.threadIdx.x  # here

    fault_in("race", "at once", all_to_one, 1, 64, floats(1))

    @cuda.jit
    def all_the_same(x):
        x[0] = 7

    x = floats(1)
    launch(all_the_same, 1, 32, x)
    assert x[0] == 7


def test_blocks_that_touch_each_others_results_race():
    @cuda.jit
    def to_the_neighbour(x):
        i = cuda.grid(1)
        x[i] = 1
        x[(i + 1) % x.size] = 2  # here

    fault_in("race", "blocks run in no order", to_the_neighbour, 2, 32, floats(64))


@pytest.mark.parametrize("limit", [16, 32, 40])
def test_a_barrier_that_only_some_threads_reach_is_found(limit):
    @cuda.jit
    def some(x):
        i = cuda.threadIdx.x
        if i < limit:
            cuda.syncthreads()  # here
        x[i] = 1

    fault_in("barrier not reached by all threads", "", some, 1, 64, floats(64))


def test_threads_that_end_before_a_barrier_are_missed_there():
    @cuda.jit
    def early(x):
        i = cuda.grid(1)
        if i >= x.size:
            return
        cuda.syncthreads()  # here
        x[i] = 1

    launch(early, 2, 32, floats(64))
    says = "18 of the 32 threads of a warp come to a barrier"
    fault_in("barrier not reached by all threads", says, early, 2, 32, floats(50))


def test_a_shuffle_whose_lanes_went_another_way_is_found():
    @cuda.jit
    def diverged(x):
        i = cuda.threadIdx.x
        if i < 16:
            x[i] = cuda.shfl_down_sync(FULL, i, 1)  # here

    fault_in("warp diverged", "", diverged, 1, 32, floats(32))


def test_a_misaligned_vector_load_is_found():
    from minidist.kernels.cuda.instructions.copies import load_128

    @cuda.jit
    def four(x, y, start):
        quad = cuda.local.array(4, float32)
        load_128(quad, 0, x, start)  # here
        for i in range(4):
            y[i] = quad[i]

    x, y = np.arange(16, dtype=np.float32), floats(4)
    launch(four, 1, 1, x, y, 4)
    np.testing.assert_array_equal(y, x[4:8])
    with pytest.raises(Fault) as caught:
        launch(four, 1, 1, x, y, 5)
    assert caught.value.kind == "misaligned"
    # The view starts 8 bytes into an allocation that is aligned, as a GPU's would be.
    with pytest.raises(Fault) as caught:
        launch(four, 1, 1, x[2:], y, 4)
    assert caught.value.kind == "misaligned"


def test_a_plain_read_beside_atomics_is_a_race_and_atomics_alone_are_none():
    @cuda.jit
    def counted(x, barrier):
        count = cuda.shared.array(1, int32)
        i = cuda.threadIdx.x
        if i == 0:
            count[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(count, 0, 1)
        if barrier:
            cuda.syncthreads()
        x[i] = count[0]  # here

    x = floats(64)
    launch(counted, 1, 64, x, True)
    np.testing.assert_array_equal(x, 64)
    fault_in("race", "reads shared memory", counted, 1, 64, x, False)


def test_an_unknown_instruction_is_named():
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature

    @intrinsic
    def odd(typingctx):
        def lower(context, builder, sig, args):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.asm(kind, "pmevent.odd 7;", "", [], True)
            builder.asm(kind, "red.async.odd;", "", [], True)
            return context.get_dummy_value()

        return signature(types.void), lower

    @cuda.jit
    def kernel(x):
        odd()
        x[0] = 1

    with pytest.raises(EmulatorError, match=r"does not know the instruction red\.async\.odd"):
        launch(kernel, 1, 1, floats(1))


test_a_launch_that_no_gpu_takes_is_refused = refuses(
    lambda given: launch(*given),
    ((guarded, 1, 1025, floats(32)), "1025 threads: a GPU runs blocks of 1 to 1024"),
    ((guarded, 1, 0, floats(32)), "0 threads"),
    ((guarded, (1, 2, 3, 4), 32, floats(32)), "one to three sizes"),
    ((guarded, -1, 32, floats(32)), "not negative"),
    ((guarded, 1, 32, [1.0]), TypeError, r"x is a list: .*NumPy arrays"),
    (("guarded", 1, 32, floats(32)), TypeError, "pass a function"),
)
test_sizes_that_no_launch_has_are_refused = refuses(
    lambda **sizes: launch(guarded, 3, 32, floats(96), **sizes),
    ({"shared": 1 << 20}, "shared memory"),
    ({"cluster": 2}, "clusters of 2"),
)


def test_a_grid_of_no_blocks_does_nothing():
    x = floats(4)
    launch(no_guard, 0, 64, x)
    np.testing.assert_array_equal(x, 0)
