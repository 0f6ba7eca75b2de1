"""Rung 3: a block copies a tile of a and one of b to shared memory, and all its threads read them there.

The idea: the threads of a block want the same elements. In rung 2 each warp fetches its row of a and its
columns of b for itself. Here 32 x 32 threads copy a tile of a and a tile of b, one element of each per
thread. They wait for each other (a barrier), then take 32 steps of p from shared memory, which is on the
chip. Each fetched element is used 32 times.

For tiles of S x S, a step of p takes 2 S elements from global memory for 2 S * S FLOP: 4 / S bytes per FLOP
in float32. S is as large as a block allows, which has at most 1024 threads: 32. Launch bounds hold the kernel
to 32 registers (none spilled). Two such blocks, 2048 threads, then fill a multiprocessor, and one can compute
while the other waits at its barrier.

Counted, float32, in rows: 0.125 bytes per FLOP from global memory, where rung 2 has 2.5. No bank conflicts: a
warp reads one element of tile_a, the same for all, and 32 neighbours of tile_b. In machine code (sm_90) each
multiply-add takes 3.6 instructions instead of 14.5, since the loop over 32 steps is unrolled and its
addresses become constants. 1.25 of them are loads from shared memory. It serves one a cycle while the
arithmetic units could do four multiply-adds, so this rung can't pass a fifth of the peak.

Source: CUDA C++ Programming Guide, "Shared Memory" (the same product with tiles of 16).
"""

from __future__ import annotations

import functools

import numba
from numba import cuda, int32, uint32

from .cuda_rung import CudaRung
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix

SIDE = 32  # of the tiles; a block has a thread for each element, and a warp for each row
TILE = (SIDE, SIDE)


@functools.cache
def kernel(dtype: str) -> Kernel:
    """Return the kernel for "float32" or "float64"; shared memory needs its dtype when compiling."""
    element = getattr(numba, dtype)

    def shared_tile(a, b, c):  # type: ignore[no-untyped-def]
        """Compute c[i, j] in one thread, and the tile around it in the block."""
        tile_a = cuda.shared.array(TILE, element)
        tile_b = cuda.shared.array(TILE, element)
        m, n = c.shape
        k = int32(a.shape[1])
        across = (n + SIDE - 1) // SIDE
        x = uint32(cuda.threadIdx.x % SIDE)
        y = uint32(cuda.threadIdx.x // SIDE)
        i = uint32(cuda.blockIdx.x // across * SIDE + y)
        j = uint32(cuda.blockIdx.x % across * SIDE + x)
        total = element(0)
        for p0 in range(0, k, SIDE):
            p = uint32(p0 + x)  # zeros beyond the edges add nothing
            tile_a[y, x] = a[i, p] if i < m and p < k else element(0)
            p = uint32(p0 + y)
            tile_b[y, x] = b[p, j] if p < k and j < n else element(0)
            cuda.syncthreads()  # the tiles are whole
            for q in range(SIDE):
                total += tile_a[y, q] * tile_b[q, x]
            cuda.syncthreads()  # all have read them
        if i < m and j < n:
            c[i, j] = total

    return Kernel(shared_tile, threads=SIDE * SIDE, blocks=2)


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    blocks = -(-c.rows // SIDE) * -(-c.columns // SIDE)
    kernel(c.dtype).launch((blocks,), a.view2d(), b.view2d(), c.view2d())


RUNG = CudaRung.of_file(
    __name__,
    idea="A block copies tiles of a and b to shared memory, on the chip, and uses each element 32 times.",
    dtypes=("float32", "float64"),
    compute=compute,
)
