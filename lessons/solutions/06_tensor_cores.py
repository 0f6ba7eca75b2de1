"""Solutions of lesson 6.

Where the elements lie is from NVIDIA's PTX ISA, "Matrix Fragments for mma.m16n8k16"; the bound on errors is
that of Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1; tiles two by two are from
Intel's Optimization Reference Manual, chapter 20.
"""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, uint32

from minidist.kernels.cuda.warp import mma_m16n8k16_f16


def element_of_a(lane, i):
    """Row and column in A (16 x 16) of element i, 0 to 7, of this lane."""
    g, t = lane // 4, lane % 4
    return g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)


@cuda.jit
def tensor_matmul(a, b, c):
    """c = a b: a warp computes 16 x 8 elements; a and b^T come as words of two float16."""
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    i0, j0 = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x  # where the warp's tile of c begins
    for r in range(4):
        sums[r] = float32(0)
    for w in range(0, a.shape[1], 8):  # 8 words are 16 elements
        fragment_a[0] = a[i0 + g, w + t]
        fragment_a[1] = a[i0 + g + 8, w + t]
        fragment_a[2] = a[i0 + g, w + t + 4]
        fragment_a[3] = a[i0 + g + 8, w + t + 4]
        fragment_b[0] = b[j0 + g, w + t]
        fragment_b[1] = b[j0 + g, w + t + 4]
        mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)
    for r in range(4):
        c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = sums[r]


def row_for_ldmatrix(lane):
    """Row and column in A (16 x 16) where the row of 8 elements begins whose address this lane gives."""
    return lane % 16, lane // 16 * 8


def rounded(x, bits):
    """Round float32 x to `bits` significant bits, to nearest, ties to even."""
    fraction, exponent = np.frexp(x)  # x = fraction * 2**exponent, fraction in [1/2, 1)
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)


def error_bound(bits, k):
    """The largest relative error of a sum of k products of positive numbers, rounded to `bits` bits."""
    return (1 + 2.0**-bits) ** 2 * (1 + 2.0**-24) ** k - 1


def tensor_core_peak(multiprocessors, cores, m, n, k, clock):
    """FLOP/s of all tensor cores together: two for each of m n k multiply-adds."""
    return 2 * m * n * k * cores * multiprocessors * clock


def in_pairs(b):
    """Rows 2 p and 2 p + 1 of b (k, n) become one row of pairs: (k / 2, 2 n). The lesson gives it."""
    k, n = b.shape
    pairs = b.reshape(k // 2, 2, n).swapaxes(1, 2)  # (k / 2, n, 2)
    return np.ascontiguousarray(pairs).reshape(k // 2, 2 * n)


def tile_matmul(unit, a, b, c):
    """c = a b by the unit's tiles, two by two; a and b are the bits of bfloat16."""
    (m, k), n = a.shape, b.shape[1]
    b = in_pairs(b)
    unit.configure(16)
    for i in range(0, m, 32):
        for j in range(0, n, 32):
            for t in range(4):
                unit.zero(t)
            for p in range(0, k, 32):
                unit.load(4, a, i, p)
                unit.load(5, a, i + 16, p)
                unit.load(6, b, p // 2, 2 * j)
                unit.load(7, b, p // 2, 2 * j + 32)
                for t in range(4):
                    unit.multiply(t)
            for t in range(4):
                unit.store(t, c, i + 16 * (t // 2), j + 16 * (t % 2))
    unit.release()
