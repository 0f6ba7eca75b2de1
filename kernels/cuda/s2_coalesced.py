"""Rung 2: rung 1 turned, so that a warp walks along a row of c.

The idea: in memory the elements of a row lie side by side. With neighbouring threads on neighbouring columns,
a warp's 32 elements of b[p, j] are 128 consecutive bytes: 4 sectors, each fully used, where rung 1 fetched 32
for its elements of a. This is called coalescing. All threads of the warp now want the same a[i, p], one
sector for all of them, and a row of c is stored in 4 sectors instead of 32.

Counted, float32, all matrices in rows: a warp reads 5 sectors for a step of p, where rung 1 has 33: 2.5 bytes
per FLOP instead of 16.5. The instructions are those of rung 1. (If b is transposed this rung is the slow one:
the 32 columns of a warp then lie a column apart.)

Source: CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory".
"""

from __future__ import annotations

from numba import cuda, int32, uint32

from .cuda_rung import CudaRung
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix

ROWS = 8  # of c, in a block: one for each warp
COLUMNS = 32  # of c, in a block: the threads of a warp


def coalesced(a, b, c):  # type: ignore[no-untyped-def]
    """Compute c[i, j] in one thread: the sum over p of a[i, p] * b[p, j]."""
    m, n = c.shape
    across = (n + COLUMNS - 1) // COLUMNS
    i = uint32(cuda.blockIdx.x // across * ROWS + cuda.threadIdx.x // COLUMNS)
    j = uint32(cuda.blockIdx.x % across * COLUMNS + cuda.threadIdx.x % COLUMNS)
    if i < m and j < n:
        total = c.dtype.type(0)
        for step in range(int32(a.shape[1])):
            p = uint32(step)
            total += a[i, p] * b[p, j]
        c[i, j] = total


KERNEL = Kernel(coalesced, threads=ROWS * COLUMNS, blocks=8)  # 2048 threads, 32 registers each


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    blocks = -(-c.rows // ROWS) * -(-c.columns // COLUMNS)
    KERNEL.launch((blocks,), a.view2d(), b.view2d(), c.view2d())


RUNG = CudaRung.of_file(
    __name__,
    idea="A warp reads and writes along rows: 32 elements of a row are 4 sectors of memory, of a column 32.",
    dtypes=("float32", "float64"),
    compute=compute,
)
