"""Rung 4: a thread computes eight elements of c, one below the other.

The idea: rung 3 waits for shared memory, with two reads for each multiply-add. A thread with eight elements
of a column of c reads the element of tile_b once for all of them: 9 reads for 8 multiply-adds. The tile of c
grows to 64 x 64 with 512 threads: 4 / 64 bytes per FLOP from global memory. The tiles of a and b are 8 steps
deep, so that each thread copies one element of each.

Counted, float32, in rows: 0.0625 bytes per FLOP from global memory, where rung 3 has 0.125. No bank
conflicts. In machine code (sm_90) each multiply-add takes 2.2 instructions instead of 3.6, of which 0.375 are
loads from shared memory instead of 1.25: the assembler reads four steps of a row of tile_a at once. With one
load a cycle that allows two thirds of the peak. The price is 90 registers per thread: only one block fits a
multiprocessor, and nothing runs while it waits at its barriers.
"""

from __future__ import annotations

import functools

import numba
from numba import cuda, int32, uint32

from .cuda_rung import CudaRung
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix

SIDE = 64  # of a block's tile of c
DEPTH = 8  # steps of p in the tiles of a and b
OWN = 8  # rows of c in a thread
THREADS = SIDE * SIDE // OWN
TILE_A, TILE_B = (SIDE, DEPTH), (DEPTH, SIDE)  # an element for each thread


@functools.cache
def kernel(dtype: str) -> Kernel:
    """Return the kernel for "float32" or "float64"."""
    element = getattr(numba, dtype)

    def thread_tile_1d(a, b, c):  # type: ignore[no-untyped-def]
        """Compute c[i0 + y : i0 + y + OWN, j0 + x] in one thread."""
        tile_a = cuda.shared.array(TILE_A, element)
        tile_b = cuda.shared.array(TILE_B, element)
        sums = cuda.local.array(OWN, element)  # registers, since every index is known when compiling
        m, n = c.shape
        k = int32(a.shape[1])
        across = (n + SIDE - 1) // SIDE
        t = uint32(cuda.threadIdx.x)
        i0 = uint32(cuda.blockIdx.x // across * SIDE)
        j0 = uint32(cuda.blockIdx.x % across * SIDE)
        x, y = uint32(t % SIDE), uint32(t // SIDE * OWN)
        a_i, a_p = uint32(t // DEPTH), uint32(t % DEPTH)  # what this thread copies to tile_a
        b_p, b_j = uint32(t // SIDE), uint32(t % SIDE)  # and to tile_b
        for e in range(OWN):
            sums[e] = 0
        for p0 in range(0, k, DEPTH):
            i, p = uint32(i0 + a_i), uint32(p0 + a_p)
            tile_a[a_i, a_p] = a[i, p] if i < m and p < k else element(0)
            p, j = uint32(p0 + b_p), uint32(j0 + b_j)
            tile_b[b_p, b_j] = b[p, j] if p < k and j < n else element(0)
            cuda.syncthreads()
            q = 0
            while q < DEPTH:  # LLVM unrolls this, but not a range(), for which Numba keeps a second counter
                factor = tile_b[q, x]
                for e in range(OWN):
                    sums[e] += tile_a[y + e, q] * factor
                q += 1
            cuda.syncthreads()
        for e in range(OWN):
            i, j = uint32(i0 + y + e), uint32(j0 + x)
            if i < m and j < n:
                c[i, j] = sums[e]

    return Kernel(thread_tile_1d, threads=THREADS)


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    blocks = -(-c.rows // SIDE) * -(-c.columns // SIDE)
    kernel(c.dtype).launch((blocks,), a.view2d(), b.view2d(), c.view2d())


RUNG = CudaRung.of_file(
    __name__,
    idea="A thread computes eight elements of a column: what it reads of b serves all of them.",
    dtypes=("float32", "float64"),
    compute=compute,
)
