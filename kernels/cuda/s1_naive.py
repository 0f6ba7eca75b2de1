"""Rung 1: one thread for each element of c.

The idea: the m x n sums don't depend on one another, so each gets a thread, and a GPU runs 2048 threads on
each multiprocessor at a time. 32 of them make a warp, which executes one instruction for all; here they are
32 neighbours down a column of c.

That direction is wrong, on purpose. Memory is read in sectors of 32 bytes. For b[p, j] all 32 threads want
the same element: one sector. For a[i, p] they want 32 elements that are a row of a apart: 32 sectors, with
only 4 bytes used of each. And the warp stores its column of c into 32 sectors.

Counted, float32, all matrices in rows: a warp reads 33 sectors for a step of p, which is 64 FLOP: 16.5 bytes
per FLOP. In machine code (sm_90) it takes 14.5 instructions for each multiply-add: two loads, their
addresses, the loop.

Source: CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory".
"""

from __future__ import annotations

from numba import cuda, int32, uint32

from .cuda_rung import CudaRung
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix

ROWS = 32  # of c, in a block: the threads of a warp
COLUMNS = 8  # of c, in a block: one for each warp


def naive(a, b, c):  # type: ignore[no-untyped-def]
    """Compute c[i, j] in one thread: the sum over p of a[i, p] * b[p, j]."""
    m, n = c.shape
    across = (n + COLUMNS - 1) // COLUMNS  # blocks side by side; a grid may have millions only along x
    # Unsigned: a signed index may be negative, counted from the end, and testing for that would double the
    # loop.
    i = uint32(cuda.blockIdx.x // across * ROWS + cuda.threadIdx.x % ROWS)
    j = uint32(cuda.blockIdx.x % across * COLUMNS + cuda.threadIdx.x // ROWS)
    if i < m and j < n:
        total = c.dtype.type(0)
        for step in range(int32(a.shape[1])):
            p = uint32(step)
            total += a[i, p] * b[p, j]
        c[i, j] = total


KERNEL = Kernel(naive, threads=ROWS * COLUMNS, blocks=8)  # 2048 threads, 32 registers each


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    blocks = -(-c.rows // ROWS) * -(-c.columns // COLUMNS)
    KERNEL.launch((blocks,), a.view2d(), b.view2d(), c.view2d())


RUNG = CudaRung.of_file(
    __name__,
    idea="A thread for each element of c: none depends on another, and a GPU runs thousands at once.",
    dtypes=("float32", "float64"),
    compute=compute,
)
