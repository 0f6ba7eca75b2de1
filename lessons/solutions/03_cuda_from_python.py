"""Solutions of lesson 3.

The grid-stride loop is from Harris 2013, "CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops".
"""

from __future__ import annotations

from numba import cuda, float32


@cuda.jit
def add(x, y, z):
    """z = x + y: a thread for each element."""
    i = cuda.grid(1)
    if i < z.size:
        z[i] = x[i] + y[i]


def sectors(first, stride):
    """How many sectors a warp's load touches whose thread t reads at address first + t * stride."""
    return len({(first + t * stride) // 32 for t in range(32)})


@cuda.jit
def matmul(a, b, c):
    """c = a b: a thread for each element, neighbours in x on neighbouring columns."""
    j, i = cuda.grid(2)
    if i < c.shape[0] and j < c.shape[1]:
        total = float32(0)
        for p in range(a.shape[1]):
            total += a[i, p] * b[p, j]
        c[i, j] = total


@cuda.jit
def sums(x, partial):
    """Add up x: each thread its share, into an element of partial of its own."""
    total = float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    partial[cuda.grid(1)] = total
