"""Kernels and rungs that tests of the CUDA infrastructure share."""

import itertools
import sys

import numpy as np
import pytest
from numba import cuda, float32, int32

from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.cuda.runtime import device
from minidist.kernels.cuda.runtime.kernel import Kernel, numba_type
from minidist.kernels.measure import product_checks

TYPES = (numba_type("float32", 1), cuda.types.int32)


@pytest.fixture(autouse=True, scope="module")
def without_gpu():
    """No GPU, whatever this machine has.

    Kernels are kept in the user's cache, under a checksum of all that they depend on: the other test process,
    the lessons' tests and the next run find them there. Most of these tests' time is compilation.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MINIDIST_CUDA_BACKEND", raising=False)
        patch.setattr(device, "has_gpu", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """A cache without kernels, for tests of the compiler, and of kernels that nobody asks for again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDIST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def events_of(function):
    """How many calls and returns Python sees while this function runs."""
    events, profile = itertools.count(), sys.getprofile()
    sys.setprofile(lambda *_: next(events))
    try:
        function()
    finally:
        sys.setprofile(profile)
    return next(events)


def multiply(a, b, c, m, n, k):
    """A thread for each element of c, a block for each 32 of a row."""
    j = int32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
    if j < n:
        total = a[cuda.blockIdx.y, 0] * b[0, j]
        for p in range(1, k):
            total += a[cuda.blockIdx.y, p] * b[p, j]
        c[cuda.blockIdx.y, j] = total


MULTIPLY = Kernel(multiply, threads=32)
COMPUTED = []


def compute(a, b, c):
    COMPUTED[:] = [x.address for x in (a, b, c)]
    grid = (-(-c.columns // 32), c.rows)
    MULTIPLY.launch(grid, a.view2d(), b.view2d(), c.view2d(), c.rows, c.columns, a.columns)


def through_numpy(a, b, c):
    """What a rung of tensor cores does, without a kernel: sums in float32."""

    def values(x):
        kind = product_checks.numpy_dtype(x.dtype)
        return x.view2d().view(kind)

    with np.errstate(all="ignore"):
        values(c)[...] = np.matmul(values(a).astype("f4"), values(b).astype("f4"))


STEP = CudaRung(1, "s1_multiply", "cuda", "A thread an element.", ("float32", "float64"), compute)
HALVES = CudaRung(
    9, "s9_halves", "cuda", "Halves.", ("float16", "bfloat16", "float32"), through_numpy, tf32=True
)


def scaled(factor):
    def scale(x, n):
        if cuda.threadIdx.x < n:
            x[cuda.threadIdx.x] *= factor

    return scale


def fill(x, n):
    dynamic = cuda.shared.array(0, float32)
    i = int32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
    dynamic[cuda.threadIdx.x] = n
    if i < x.shape[0]:
        x[i] = dynamic[cuda.threadIdx.x]
