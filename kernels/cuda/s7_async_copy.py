"""Rung 7: asynchronous copies from global to shared memory, three panels ahead.

The idea: rung 6 loads a panel, waits for it, multiplies, and loads the next; while a block waits for memory,
hundreds of cycles, it does nothing. After an asynchronous copy (cp.async) the thread goes on at once. Shared
memory holds a ring of four pairs of panels: one is multiplied while three are on their way. The copies no
longer pass through registers.

One barrier per panel is enough, where rung 6 has two. It says two things: this panel's copies have arrived
for all threads, each having waited for its own; and all threads are done with the panel before, into whose
slot the next copies go. Beyond the edges of a and b, and past the last panel, a copy writes zeros and reads
nothing.

A copy of 16 bytes can't transpose. If an operand has unit stride along p, a copy moves 4 bytes
(`tiling.panels.panel`): four instructions where rung 6 has one load and four stores, from rows that begin
anywhere.

Counted, float32, in rows (sm_90): a thread's 5 copies for a pair of panels come with 65 instructions for
addresses, edges and the ring; in all 1.31 for each multiply-add, where rung 6 has 1.26. The gain is in the
waiting: three panels are 1800 instructions of each warp, and 33 KB of shared memory, with two blocks.

Source: PTX ISA, "Data Movement and Conversion Instructions: cp.async".
"""

from __future__ import annotations

import functools

from numba import cuda, float32, int32, int64

from .cuda_rung import CudaRung
from .instructions.copies import cp_async_commit, cp_async_wait, load_128
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix, StorageOrder
from .tiling.panels import ALIGNMENT, operand, panel, pitch, store_four, stores_vectors

SIDE = 128  # of a block's tile of c
DEPTH = 8  # steps of p in a panel
ROW = SIDE + 4  # elements from a step to the next
PANEL = DEPTH * ROW
STAGES = 4  # pairs of panels in the ring
STAGE = 2 * PANEL
RING = STAGES * STAGE
LAST = RING - STAGE  # where the last stage begins
AHEAD = STAGES - 1  # pairs that are copied while one is multiplied
PENDING = AHEAD - 1  # of them that may still be under way when the next is multiplied
OWN = 8  # rows, and columns, of c in a thread: two groups of four
APART = SIDE // 2  # from one group to the other
SUMS = OWN * OWN
THREADS = SIDE * SIDE // SUMS


@functools.cache
def kernel(a_order: StorageOrder, b_order: StorageOrder, vectors: bool) -> Kernel:
    """Return the kernel for a and the transposed b of these orders; `vectors` says how c is stored."""
    place_a, index_a, copy_a = panel(a_order, SIDE, DEPTH, ROW, THREADS)
    place_b, index_b, copy_b = panel(b_order, SIDE, DEPTH, ROW, THREADS)
    store = store_four(vectors)

    def async_copy(a, b, c, m, n, k, a_pitch, b_pitch, c_row, c_column):  # type: ignore[no-untyped-def]
        """Compute 8 x 8 elements of c in one thread, in groups of 4 x 4."""
        ring = cuda.shared.array(RING, float32, alignment=ALIGNMENT)
        sums = cuda.local.array(SUMS, float32)
        column = cuda.local.array(OWN, float32)  # a step of the panel of a
        row = cuda.local.array(OWN, float32)  # and of b
        across = int32((n + SIDE - 1) // SIDE)
        t = int32(cuda.threadIdx.x)
        i0 = int32(cuda.blockIdx.x // across * SIDE)
        j0 = int32(cuda.blockIdx.x % across * SIDE)
        x, y = int32(t % 16 * 4), int32(t // 16 * 4)
        a_p, a_i = place_a(t)
        b_p, b_j = place_b(t)
        a_at, b_at = index_a(a_p, i0 + a_i, a_pitch), index_b(b_p, j0 + b_j, b_pitch)
        a_to, b_to = int32(a_p * ROW + a_i), int32(PANEL + b_p * ROW + b_j)
        a_wide, b_wide = int32(m - i0 - a_i), int32(n - j0 - b_j)
        for e in range(SUMS):
            sums[e] = 0
        p0, write, read = int32(0), int32(0), int32(0)
        for turn in range(-AHEAD, int32((k + DEPTH - 1) // DEPTH)):
            if turn >= 0:
                cp_async_wait(PENDING)
                cuda.syncthreads()
            copy_a(ring, write + a_to, a, a_at, a_pitch, int32(k - p0 - a_p), a_wide)
            copy_b(ring, write + b_to, b, b_at, b_pitch, int32(k - p0 - b_p), b_wide)
            cp_async_commit()
            a_at += index_a(DEPTH, 0, a_pitch)
            b_at += index_b(DEPTH, 0, b_pitch)
            p0 = int32(p0 + DEPTH)
            write = int32(write + STAGE) if write < LAST else int32(0)
            if turn >= 0:
                q = int32(0)
                while q < PANEL:
                    for e in range(0, OWN, 4):
                        load_128(column, e, ring, read + q + y + e // 4 * APART)
                        load_128(row, e, ring, read + PANEL + q + x + e // 4 * APART)
                    for e in range(OWN):
                        for f in range(OWN):
                            sums[e * OWN + f] += column[e] * row[f]
                    q = int32(q + ROW)
                read = int32(read + STAGE) if read < LAST else int32(0)
        for e in range(OWN):
            i = int32(i0 + y + e // 4 * APART + e % 4)
            if i < m:
                for f in range(0, OWN, 4):
                    j = int32(j0 + x + f // 4 * APART)
                    store(c, int64(i) * c_row + int64(j) * c_column, c_column, sums, e * OWN + f, n - j)

    return Kernel(async_copy, threads=THREADS, blocks=2, architecture="sm_80")


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    if c.order == "columns":  # rows of the transposed product
        a, b, c = b.T, a.T, c.T
    x, y = operand(a), operand(b.T)
    blocks = -(-c.rows // SIDE) * -(-c.columns // SIDE)
    strides = (pitch(x), pitch(y), c.row_stride, c.column_stride)
    kernel(x.order, y.order, stores_vectors(c)).launch(
        (blocks,), x.data, y.data, c.data, c.rows, c.columns, a.columns, *strides
    )


RUNG = CudaRung.of_file(
    __name__,
    idea="Asynchronous copies into a ring, three panels ahead: nothing waits for global memory.",
    dtypes=("float32",),
    compute=compute,
    architecture="sm_80",
)
