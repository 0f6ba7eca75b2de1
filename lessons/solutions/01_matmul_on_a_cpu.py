"""Solutions of lesson 1.

Blocks and the register tile are from Goto and van de Geijn 2008, "Anatomy of high-performance matrix
multiplication".
"""

from __future__ import annotations


def matmul_loops(a, b, c):
    """Fill c (m, n) with a (m, k) times b (k, n): one sum for each element of c."""
    m, k = a.shape
    n = b.shape[1]
    for i in range(m):
        for j in range(n):
            total = 0.0
            for p in range(k):
                total += a[i, p] * b[p, j]
            c[i, j] = total


def intensity(m, k, n, itemsize):
    """FLOPs for each byte: two for each multiply-add; a and b are read once, and c is written once."""
    return 2 * m * k * n / (itemsize * (m * k + k * n + m * n))


def matmul_rows(a, b, c):
    """The same sums, grown side by side: the inner loop walks along a row of b and a row of c."""
    m, k = a.shape
    n = b.shape[1]
    c[:] = 0
    for i in range(m):
        for p in range(k):
            factor = a[i, p]
            for j in range(n):
                c[i, j] += factor * b[p, j]


def matmul_blocks(a, b, c, size):
    """The same for one block of b after the other, `size` rows: it stays in the cache for all rows of a."""
    m, k = a.shape
    n = b.shape[1]
    c[:] = 0
    for p0 in range(0, k, size):
        for i in range(m):
            for p in range(p0, min(p0 + size, k)):
                factor = a[i, p]
                for j in range(n):
                    c[i, j] += factor * b[p, j]


def matmul_tile(a, b, c):
    """The same with 2 x 4 elements of a in registers; m is a multiple of 2, and k of 4."""
    m, k = a.shape
    n = b.shape[1]
    c[:] = 0
    for i in range(0, m, 2):
        for p in range(0, k, 4):
            a00, a01, a02, a03 = a[i, p], a[i, p + 1], a[i, p + 2], a[i, p + 3]
            a10, a11, a12, a13 = a[i + 1, p], a[i + 1, p + 1], a[i + 1, p + 2], a[i + 1, p + 3]
            for j in range(n):
                b0, b1, b2, b3 = b[p, j], b[p + 1, j], b[p + 2, j], b[p + 3, j]
                c[i, j] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3
                c[i + 1, j] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3
