"""Rung 6: loads and stores of 16 bytes, in global and in shared memory.

The idea: load four neighbours with one instruction and one address instead of four. A thread's rows and
columns now come in groups of four side by side. For a step of p it reads two groups of a and two of b: 4
loads for 64 multiply-adds, where rung 5 has 16. It loads its share of a panel, four elements of each operand,
in one load each, and stores c four by four.

Four rows of a are neighbours only if a step of p is a row in shared memory, so a panel is (DEPTH, SIDE) there
for both operands. If an operand has unit stride along p (a in rows, b in columns), a thread loads four steps
of one row and stores them one by one, transposed. Steps lie 128 + 4 elements apart, which puts the 32 stores
of a warp into 32 banks; with 128 they would meet in 16.

The storage orders of a and b are known when compiling, so transposed operands run at full speed. The price:
an operand without unit stride, or whose rows do not begin and end on 16 bytes, is copied first (`packed`),
which reads and writes it once.

Counted, float32, in rows (sm_90): 1.26 instructions for each multiply-add, where rung 5 has 1.72. A step of p
is 75, of which 64 multiply; copying both panels for 8 steps takes 45, where rung 5 takes 183.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, int32, int64

from .cuda_rung import CudaRung
from .instructions.copies import load_128, store_128
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix, StorageOrder
from .tiling.packing import packed
from .tiling.panels import ALIGNMENT, Function, inlined, store_four, stores_vectors

SIDE = 128  # of a block's tile of c
DEPTH = 8  # steps of p in a panel
ROW = SIDE + 4  # elements from a step to the next
PANEL = DEPTH * ROW
OWN = 8  # rows, and columns, of c in a thread: two groups of four
APART = SIDE // 2  # from one group to the other
SUMS = OWN * OWN
THREADS = SIDE * SIDE // SUMS
GROUPS = SIDE // 4  # in a step of a panel


@functools.cache
def putting(order: StorageOrder) -> tuple[Function, Function]:
    """Return place(t), the (p, i) of thread t's four elements in a panel, and put(panel, p, i, four).

    put stores the four. The panel's operand is seen as (SIDE, DEPTH): in order "rows" its neighbours are four
    steps p.
    """
    if order == "rows":

        def place(t):  # type: ignore[no-untyped-def]
            return int32(t % 2 * 4), int32(t // 2)

        def put(panel, p, i, four):  # type: ignore[no-untyped-def]
            for e in range(4):
                panel[(p + e) * ROW + i] = four[e]

    else:

        def place(t):  # type: ignore[no-untyped-def]
            return int32(t // GROUPS), int32(t % GROUPS * 4)

        def put(panel, p, i, four):  # type: ignore[no-untyped-def]
            store_128(panel, p * ROW + i, four, 0)

    return inlined(place), inlined(put)


@functools.cache
def kernel(a_order: StorageOrder, b_order: StorageOrder, vectors: bool) -> Kernel:
    """Return the kernel for a and the transposed b of these orders; `vectors` says how c is stored."""
    place_a, put_a = putting(a_order)
    place_b, put_b = putting(b_order)
    store = store_four(vectors)

    def vector_loads(a, b, c, m, n, k, a_row, a_column, b_row, b_column, c_row, c_column):  # type: ignore[no-untyped-def]
        """Compute 8 x 8 elements of c in one thread, in groups of 4 x 4."""
        panel_a = cuda.shared.array(PANEL, float32, alignment=ALIGNMENT)
        panel_b = cuda.shared.array(PANEL, float32, alignment=ALIGNMENT)
        sums = cuda.local.array(SUMS, float32)
        column = cuda.local.array(OWN, float32)  # a step of the panel of a
        row = cuda.local.array(OWN, float32)  # and of b
        four = cuda.local.array(4, float32)
        across = int32((n + SIDE - 1) // SIDE)
        t = int32(cuda.threadIdx.x)
        i0 = int32(cuda.blockIdx.x // across * SIDE)
        j0 = int32(cuda.blockIdx.x % across * SIDE)
        x, y = int32(t % 16 * 4), int32(t // 16 * 4)
        a_p, a_i = place_a(t)
        b_p, b_j = place_b(t)
        for e in range(SUMS):
            sums[e] = 0
        for p0 in range(0, k, DEPTH):
            for e in range(4):
                four[e] = 0
            i, p = int32(i0 + a_i), int32(p0 + a_p)
            if i < m and p < k:
                load_128(four, 0, a, int64(i) * a_row + int64(p) * a_column)
            put_a(panel_a, a_p, a_i, four)
            for e in range(4):
                four[e] = 0
            p, j = int32(p0 + b_p), int32(j0 + b_j)
            if p < k and j < n:
                load_128(four, 0, b, int64(p) * b_row + int64(j) * b_column)
            put_b(panel_b, b_p, b_j, four)
            cuda.syncthreads()
            q = int32(0)
            while q < PANEL:
                for e in range(0, OWN, 4):
                    load_128(column, e, panel_a, q + y + e // 4 * APART)
                    load_128(row, e, panel_b, q + x + e // 4 * APART)
                for e in range(OWN):
                    for f in range(OWN):
                        sums[e * OWN + f] += column[e] * row[f]
                q = int32(q + ROW)
            cuda.syncthreads()
        for e in range(OWN):
            i = int32(i0 + y + e // 4 * APART + e % 4)
            if i < m:
                for f in range(0, OWN, 4):
                    j = int32(j0 + x + f // 4 * APART)
                    store(c, int64(i) * c_row + int64(j) * c_column, c_column, sums, e * OWN + f, n - j)

    return Kernel(vector_loads, threads=THREADS, blocks=2)


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    if c.order == "columns":  # rows of the transposed product
        a, b, c = b.T, a.T, c.T
    a, b = packed(a, 4, padded=True), packed(b, 4, padded=True)
    blocks = -(-c.rows // SIDE) * -(-c.columns // SIDE)
    strides = (a.row_stride, a.column_stride, b.row_stride, b.column_stride, c.row_stride, c.column_stride)
    kernel(a.order, b.T.order, stores_vectors(c)).launch(
        (blocks,), a.data, b.data, c.data, c.rows, c.columns, a.columns, *strides
    )


RUNG = CudaRung.of_file(
    __name__,
    idea="Loads and stores of 16 bytes, in global and in shared memory: a quarter of the instructions.",
    dtypes=("float32",),
    compute=compute,
)
