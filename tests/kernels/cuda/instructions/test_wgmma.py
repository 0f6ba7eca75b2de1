"""wgmma's descriptor of a tile in shared memory, bit by bit."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from numba import cuda, uint32

from minidist.kernels.cuda.instructions import wgmma
from minidist.kernels.cuda.runtime.kernel import Kernel
from tests.helpers.cuda_kernels import without_gpu  # noqa: F401


def describe(found):
    shared = cuda.shared.array(0, uint32, alignment=1024)
    found[0] = wgmma.descriptor(shared, 0, 8192, 1024)
    found[1] = wgmma.descriptor(shared, 512, 8192, 1024)
    found[2] = wgmma.descriptor(shared, (1 << 22) + 512, 8192, 1024)  # as in the cluster's second block


def test_a_descriptor_holds_address_strides_and_swizzle_and_not_the_rank_of_the_block():
    found = np.zeros(3, np.int64)
    Kernel(describe, threads=1, architecture="sm_90a").launch((1,), found, shared=4096)
    first, second, in_second_block = (int(x) for x in found)
    assert first & 0x3FFF == 0
    assert first >> 16 == 8192 >> 4 | 1024 >> 4 << 16 | 1 << 46
    assert second - first == 2048 >> 4
    assert in_second_block == second
