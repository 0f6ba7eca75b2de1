"""Kernels of the kinds that people write, run from their PTX: results against NumPy, counts by hand."""

import math

import numpy as np
import pytest
from numba import cuda, float32, int32

from minidist.kernels.emulator import launch, profile, profiled

FULL = 0xFFFFFFFF


@pytest.fixture
def rng():
    return np.random.default_rng()


@cuda.jit
def product(a, b, c):
    i, j = cuda.grid(2)
    if i < c.shape[0] and j < c.shape[1]:
        total = c.dtype.type(0)
        for p in range(a.shape[1]):
            total += a[i, p] * b[p, j]
        c[i, j] = total


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.complex128])
def test_products_of_any_strides_and_dtypes(rng, dtype):
    a = (10 * rng.standard_normal((37, 21))).astype(dtype)
    b = (10 * rng.standard_normal((15, 2 * 21))).astype(dtype)[:, ::-2].T
    c = np.zeros((37, 15), dtype)
    launch(product, (3, 1), (16, 16), a, b, c)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-3 if dtype == np.float32 else 1e-12)


def test_a_reduction_by_shuffles_and_atomics(rng):
    @cuda.jit
    def total(x, out):
        i = cuda.grid(1)
        value = x[i] if i < x.size else 0
        for offset in (16, 8, 4, 2, 1):
            value += cuda.shfl_down_sync(FULL, value, offset)
        if cuda.laneid == 0:
            cuda.atomic.add(out, 0, value)

    x, out = rng.integers(-1000, 1000, 1003), np.zeros(1, np.int64)
    launch(total, 8, 128, x, out)
    assert out[0] == x.sum()


def test_a_histogram_with_atomics_in_shared_memory(rng):
    @cuda.jit
    def histogram(x, counts):
        bins = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        if i < 64:
            bins[i] = 0
        cuda.syncthreads()
        for k in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            cuda.atomic.add(bins, x[k], 1)
        cuda.syncthreads()
        if i < 64:
            cuda.atomic.add(counts, i, bins[i])

    x, counts = rng.integers(0, 64, 5000), np.zeros(64, np.int32)
    launch(histogram, 4, 128, x, counts)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=64))


def test_a_lock_made_of_atomics(rng):
    @cuda.jit
    def locked(lock, counter):
        if cuda.threadIdx.x % 32 == 0:
            while cuda.atomic.cas(lock, 0, 0, 1) != 0:
                pass
            cuda.threadfence()
            counter[0] += 1
            cuda.threadfence()
            cuda.atomic.exch(lock, 0, 0)

    counter = np.zeros(1, np.int32)
    launch(locked, 2, 96, np.zeros(1, np.int32), counter)
    assert counter[0] == 6


@pytest.mark.parametrize("name", ["sin", "exp", "log1p", "atan", "lgamma"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_of_mathematics(rng, name, dtype):
    function = getattr(math, name)

    @cuda.jit
    def apply(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = function(x[i])

    x = np.concatenate([rng.uniform(0.01, 30, 90), [1e-8, 1.0]]).astype(dtype)
    y = np.full_like(x, np.nan)
    launch(apply, 3, 32, x, y)
    expected = [function(float(value)) for value in x]
    np.testing.assert_allclose(y, expected, rtol=3e-6 if dtype == np.float32 else 1e-13, atol=1e-6)


def test_constant_arrays_and_functions_that_are_called():
    table = np.arange(10, dtype=np.float32) ** 2

    @cuda.jit(device=True, inline="never")
    def wave(x, scale):
        return math.sin(x) * scale

    @cuda.jit
    def kernel(x):
        constant = cuda.const.array_like(table)
        i = cuda.grid(1)
        x[i] = wave(x[i], constant[i % 10])

    x = np.linspace(-3, 3, 64).astype(np.float32)
    expected = np.sin(x.astype(np.float64)) * table[np.arange(64) % 10]
    launch(kernel, 2, 32, x)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


def test_a_kernel_prints(capsys):
    @cuda.jit
    def speaking(x):
        i = cuda.threadIdx.x
        if i < 2:
            print("thread", i, "has", x[i])

    launch(speaking, 1, 32, np.array([0.5, -2.0] + [0.0] * 30))
    assert capsys.readouterr().out == "thread 0 has 0.500000\nthread 1 has -2.000000\n"


def test_torch_tensors_are_written_in_place():
    import torch

    @cuda.jit
    def double(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= 2

    x = torch.arange(50, dtype=torch.float32)
    launch(double, 1, 64, x)
    torch.testing.assert_close(x, 2.0 * torch.arange(50))


def copy_with_stride(stride):
    @cuda.jit
    def copy(x, y):
        i = cuda.grid(1)
        y[i] = x[i * stride]

    return copy


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (16, 32)])
def test_sectors_of_a_request_are_those_that_its_bytes_lie_in(stride, sectors):
    x, y = np.zeros(256 * stride, np.float32), np.zeros(256, np.float32)
    counts = profile(copy_with_stride(stride), 2, 128, x, y)
    assert counts.sectors_per_load == sectors
    assert counts.sectors_per_store == 4
    assert counts.total.loads == 8  # 256 threads are 8 warps
    assert counts.total.load_bytes == 1024


def test_a_warp_that_starts_between_two_sectors_needs_one_more():
    x, y = np.zeros(64, np.float32), np.zeros(32, np.float32)
    assert profile(copy_with_stride(1), 1, 32, x[1:], y).sectors_per_load == 5


@pytest.mark.parametrize(("pitch", "conflicts"), [(32, 31), (33, 0), (34, 1), (36, 3)])
def test_bank_conflicts_of_a_column_depend_on_the_pitch(pitch, conflicts):
    size = 32 * pitch

    @cuda.jit
    def columns(x):
        tile = cuda.shared.array(size, float32)
        i = cuda.threadIdx.x
        for row in range(32):
            tile[row * pitch + i] = x[row, i]
        cuda.syncwarp()
        for column in range(32):
            x[column, i] = tile[i * pitch + column]

    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    counts = profile(columns, 1, 32, x)
    np.testing.assert_array_equal(x, np.arange(1024).reshape(32, 32).T)
    assert counts.shared_conflicts == 32 * conflicts


def test_the_table_of_a_profile_has_a_line_for_each_line_of_source():
    counts = profile(product, (2, 2), (16, 16), *(np.ones((32, 32), np.float32) for _ in range(3)))
    assert counts.instructions["multiply-add"] == 32 * 32 * 32 // 32
    lines = {int(place.rpartition(":")[2]): line for place, line in counts.lines.items()}
    first = product.py_func.__code__.co_firstlineno
    inner = lines[first + 6]
    assert inner.loads == 2 * 32 * 32 * 32 // 32
    assert lines[first + 7].stores == 32
    text = str(counts)
    assert text.startswith("product")
    assert f"test_kernels.py:{first + 6}" in text


def test_all_that_runs_meanwhile_is_counted():
    ones = [np.ones((32, 32), np.float32) for _ in range(3)]
    with profiled("two products") as counts:
        launch(product, (2, 2), (16, 16), *ones)
        launch(product, (2, 2), (16, 16), *ones)
    launch(product, (2, 2), (16, 16), *ones)
    assert counts.instructions["multiply-add"] == 2 * 32 * 32 * 32 // 32
    assert str(counts).startswith("two products")
