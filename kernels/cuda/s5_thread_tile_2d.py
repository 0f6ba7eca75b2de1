"""Rung 5: a thread computes 8 x 8 elements of c.

The idea: a rectangle of sums uses each read in both directions. For a step of p a thread reads 8 elements of
tile_a and 8 of tile_b into registers, and multiplies each by each: 16 reads for 64 multiply-adds, where rung
4 takes 9 for 8. The tile of c grows to 128 x 128 with 256 threads: 4 / 128 bytes per FLOP from global memory.

A thread's rows lie 16 apart, and so do its columns. A warp, 16 threads wide and 2 high, therefore reads 16
neighbours of tile_b at once, in 16 banks. Eight columns side by side would put the 16 threads 8 elements
apart, in four banks: four passes for each read. And c is stored in runs of 64 bytes.

Counted, float32, in rows: 0.031 bytes per FLOP from global memory, where rung 4 has 0.0625. No bank
conflicts. In machine code (sm_90) each multiply-add takes 1.7 instructions instead of 2.2, of which 0.25 are
loads from shared memory: one a cycle now keeps up with the arithmetic. 95 registers allow two blocks on a
multiprocessor; in float64 64 sums take twice as many, and allow one.
"""

from __future__ import annotations

import functools

import numba
from numba import cuda, int32, uint32

from .cuda_rung import CudaRung
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix

SIDE = 128  # of a block's tile of c
DEPTH = 8  # steps of p in the tiles of a and b
OWN = 8  # rows, and columns, of c in a thread
APART = SIDE // OWN  # from one to the next
THREADS = APART * APART
COPIES = SIDE * DEPTH // THREADS  # elements of each tile that a thread copies
TILE_A, TILE_B, SUMS = (SIDE, DEPTH), (DEPTH, SIDE), (OWN, OWN)


@functools.cache
def kernel(dtype: str) -> Kernel:
    """Return the kernel for "float32" or "float64"."""
    element = getattr(numba, dtype)

    def thread_tile_2d(a, b, c):  # type: ignore[no-untyped-def]
        """Compute c[i0 + y :: APART, j0 + x :: APART] in one thread, OWN rows and columns of it."""
        tile_a = cuda.shared.array(TILE_A, element)
        tile_b = cuda.shared.array(TILE_B, element)
        sums = cuda.local.array(SUMS, element)
        column = cuda.local.array(OWN, element)  # of tile_a
        row = cuda.local.array(OWN, element)  # of tile_b
        m, n = c.shape
        k = int32(a.shape[1])
        across = (n + SIDE - 1) // SIDE
        t = uint32(cuda.threadIdx.x)
        i0 = uint32(cuda.blockIdx.x // across * SIDE)
        j0 = uint32(cuda.blockIdx.x % across * SIDE)
        x, y = uint32(t % APART), uint32(t // APART)
        for e in range(OWN):
            for f in range(OWN):
                sums[e, f] = 0
        for p0 in range(0, k, DEPTH):
            for copy in range(COPIES):
                at = uint32(copy * THREADS + t)
                a_i, a_p = uint32(at // DEPTH), uint32(at % DEPTH)
                i, p = uint32(i0 + a_i), uint32(p0 + a_p)
                tile_a[a_i, a_p] = a[i, p] if i < m and p < k else element(0)
                b_p, b_j = uint32(at // SIDE), uint32(at % SIDE)
                p, j = uint32(p0 + b_p), uint32(j0 + b_j)
                tile_b[b_p, b_j] = b[p, j] if p < k and j < n else element(0)
            cuda.syncthreads()
            q = 0
            while q < DEPTH:
                for e in range(OWN):
                    column[e] = tile_a[y + e * APART, q]
                    row[e] = tile_b[q, x + e * APART]
                for e in range(OWN):
                    for f in range(OWN):
                        sums[e, f] += column[e] * row[f]
                q += 1
            cuda.syncthreads()
        for e in range(OWN):
            for f in range(OWN):
                i, j = uint32(i0 + y + e * APART), uint32(j0 + x + f * APART)
                if i < m and j < n:
                    c[i, j] = sums[e, f]

    return Kernel(thread_tile_2d, threads=THREADS)


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    blocks = -(-c.rows // SIDE) * -(-c.columns // SIDE)
    kernel(c.dtype).launch((blocks,), a.view2d(), b.view2d(), c.view2d())


RUNG = CudaRung.of_file(
    __name__,
    idea="A thread computes 8 x 8 elements: 16 reads from shared memory serve 64 multiply-adds.",
    dtypes=("float32", "float64"),
    compute=compute,
)
