"""Rung 8: an inner loop of multiply-adds, and as little else as the instruction set allows.

The idea: a multiprocessor of an H100 issues four warp instructions a cycle, and can do four multiply-adds;
every other instruction takes the place of one. Here a step of p is 128 multiply-adds and 6 loads of 16 bytes.

- A thread has 8 x 16 sums, which need 8 + 16 elements a step. Registers hold these fragments twice: the next
  step's are loaded while this step's are multiplied. 215 registers: one block of 256 threads.
- A warp's 32 threads lie 8 x 4 on a tile of 64 x 64: it reads 64 + 64 different elements for 4096
  multiply-adds, where rung 7's warps, 2 x 16 on 16 x 128, read 144 for 2048. Neighbouring lanes share
  columns, and lanes two apart share rows, so eight lanes, which a load of 16 bytes serves at once, ask for at
  most 64 bytes.
- The 8 steps of a panel are unrolled, so their addresses are constants. Sums are visited up and down in
  turns, so that a multiply-add shares a factor with the one before it and gets it from the reuse cache.
- The ragged panel, where k is not a multiple of 8, comes first. After it no copy checks k, and whether a copy
  is beyond m or n is the same in all panels: one predicate.
- Blocks take tiles of c in groups of 16 rows of tiles, for the L2 cache (`tiling/tile_order.py`).

Counted, float32, in rows (sm_90): 1.09 instructions for each multiply-add, where rung 7 has 1.31: 1117 in the
loop for 1024, of which 48 load fragments and 6 copy. A warp alone needs 1164 cycles for them, by the stalls
that the assembler wrote, and two share a scheduler. With b transposed it is 1.12. From global memory 0.023
bytes per FLOP. 4096 x 4096 are 512 tiles, 3.88 for each of 132 multiprocessors: 97% of four rounds.

If there are too few such tiles for all multiprocessors, or they leave the last round nearly empty, tiles are
64 x 128 with 128 threads, four blocks on each multiprocessor: 1.16 instructions.

Source: NVIDIA, CUTLASS documentation, "Efficient GEMM in CUDA".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba import cuda, float32, int32, int64

from .cuda_rung import CudaRung
from .instructions.copies import cp_async_commit, cp_async_wait, load_128
from .runtime import gpu_driver
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix, StorageOrder
from .tiling.panels import ALIGNMENT, inlined, operand, panel, pitch, store_four, stores_vectors, unrolled
from .tiling.tile_order import grouped

DEPTH = 8  # steps of p in a panel
DOWN, ACROSS = 8, 4  # threads of a warp on its tile of c
GROUP = 16  # rows of tiles done together


@dataclass(frozen=True)
class Tile:
    """A block's tile of c, and how its threads share it."""

    rows: int
    columns: int
    own_rows: int  # of c in a thread: groups of four
    own_columns: int
    stages: int  # pairs of panels in the ring
    blocks: int  # at least so many on a multiprocessor
    instructions: float  # for each multiply-add, counted

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows * self.columns // (self.own_rows * self.own_columns)

    def count(self, m: int, n: int) -> int:
        """Return how many tiles cover c (m, n)."""
        return -(-m // self.rows) * -(-n // self.columns)


LARGE = Tile(rows=128, columns=256, own_rows=8, own_columns=16, stages=3, blocks=1, instructions=1.09)
SMALL = Tile(rows=64, columns=128, own_rows=8, own_columns=8, stages=4, blocks=4, instructions=1.16)


@functools.cache
def kernel(a_order: StorageOrder, b_order: StorageOrder, vectors: bool, tile: Tile) -> Kernel:
    """Return the kernel for a and the transposed b of these orders; `vectors` says how c is stored."""
    rows, columns, own_rows, own_columns = tile.rows, tile.columns, tile.own_rows, tile.own_columns
    a_step, b_step = rows + 4, columns + 4  # elements from a step of a panel to the next
    b_start = DEPTH * a_step  # of the panel of b in a stage
    stage = DEPTH * (a_step + b_step)
    ring_size, last_stage = tile.stages * stage, (tile.stages - 1) * stage
    ahead = tile.stages - 1  # pairs of panels that are copied while one is multiplied
    pending = ahead - 1
    sums_size, columns_size, rows_size = own_rows * own_columns, 2 * own_rows, 2 * own_columns
    row_groups, column_groups = own_rows // 4, own_columns // 4
    warps_across = columns // (ACROSS * own_columns)
    place_a, index_a, copy_a = panel(a_order, rows, DEPTH, a_step, tile.threads)
    place_b, index_b, copy_b = panel(b_order, columns, DEPTH, b_step, tile.threads)
    store = store_four(vectors)
    find_tile = inlined(grouped)

    @inlined
    def load(p, column, row, ring, from_a, from_b):  # type: ignore[no-untyped-def]
        """Load the fragments of step p into one of the two sets of registers."""
        for e in range(row_groups):
            there = from_a + p % DEPTH * a_step + e * 4 * DOWN
            load_128(column, p % 2 * own_rows + e * 4, ring, there)
        for f in range(column_groups):
            there = from_b + p % DEPTH * b_step + f * 4 * ACROSS
            load_128(row, p % 2 * own_columns + f * 4, ring, there)

    @inlined
    def multiply(p, column, row, sums):  # type: ignore[no-untyped-def]
        """Add the products of step p."""
        for e0 in range(0, own_rows, 4):
            for f in range(own_columns):
                for turn in range(4):
                    e = e0 + (3 - turn if f % 2 == 1 else turn)
                    sums[e * own_columns + f] += column[p % 2 * own_rows + e] * row[p % 2 * own_columns + f]

    @inlined
    def take_step(p, column, row, sums, ring, from_a, from_b):  # type: ignore[no-untyped-def]
        load(p + 1, column, row, ring, from_a, from_b)
        multiply(p, column, row, sums)

    @inlined
    def store_group(group, c, sums, i0, j0, m, n, c_row, c_column):  # type: ignore[no-untyped-def]
        e = group // column_groups
        i = int32(i0 + e // 4 * 4 * DOWN + e % 4)
        j = int32(j0 + group % column_groups * 4 * ACROSS)
        if i < m:
            store(c, int64(i) * c_row + int64(j) * c_column, c_column, sums, group * 4, n - j)

    all_steps_but_one = unrolled(take_step, DEPTH - 1)
    store_all = unrolled(store_group, sums_size // 4)

    def warp_tile(a, b, c, m, n, k, a_pitch, b_pitch, c_row, c_column):  # type: ignore[no-untyped-def]
        """Compute own_rows x own_columns elements of c in one thread, in groups of 4 x 4."""
        ring = cuda.shared.array(ring_size, float32, alignment=ALIGNMENT)
        sums = cuda.local.array(sums_size, float32)
        column = cuda.local.array(columns_size, float32)
        row = cuda.local.array(rows_size, float32)
        t = int32(cuda.threadIdx.x)
        i, j = find_tile(cuda.blockIdx.x, (m + rows - 1) // rows, (n + columns - 1) // columns, GROUP)
        i0, j0 = int32(i * rows), int32(j * columns)

        # Begin to copy the first panels.
        a_p, a_i = place_a(t)
        b_p, b_j = place_b(t)
        a_at, b_at = index_a(a_p, i0 + a_i, a_pitch), index_b(b_p, j0 + b_j, b_pitch)
        a_to, b_to = int32(a_p * a_step + a_i), int32(b_start + b_p * b_step + b_j)
        a_wide, b_wide = int32(m - i0 - a_i), int32(n - j0 - b_j)
        left = int32((k + DEPTH - 1) // DEPTH)  # panels, with the one that is multiplied
        first = int32(k - (left - 1) * DEPTH)  # steps of the first
        copy_a(ring, a_to, a, a_at, a_pitch, first - a_p, a_wide)
        copy_b(ring, b_to, b, b_at, b_pitch, first - b_p, b_wide)
        cp_async_commit()
        a_at += index_a(first, 0, a_pitch)
        b_at += index_b(first, 0, b_pitch)
        for s in range(1, ahead):
            if s < left:
                copy_a(ring, s * stage + a_to, a, a_at, a_pitch, DEPTH, a_wide)
                copy_b(ring, s * stage + b_to, b, b_at, b_pitch, DEPTH, b_wide)
                a_at += index_a(DEPTH, 0, a_pitch)
                b_at += index_b(DEPTH, 0, b_pitch)
            cp_async_commit()

        lane, warp = int32(t % 32), int32(t // 32)
        y = int32(warp // warps_across * DOWN * own_rows + (lane // 8 * 2 + lane % 2) * 4)
        x = int32(warp % warps_across * ACROSS * own_columns + lane // 2 % 4 * 4)
        from_a, from_b = y, int32(b_start + x)
        read, write = int32(0), int32(last_stage)
        for e in range(sums_size):
            sums[e] = 0
        # Steps have a type, int64: Numba compiles a function again for each literal.
        cp_async_wait(pending)
        cuda.syncthreads()
        load(int64(0), column, row, ring, read + from_a, read + from_b)
        while left > 0:
            if left > ahead:
                copy_a(ring, write + a_to, a, a_at, a_pitch, DEPTH, a_wide)
                copy_b(ring, write + b_to, b, b_at, b_pitch, DEPTH, b_wide)
                a_at += index_a(DEPTH, 0, a_pitch)
                b_at += index_b(DEPTH, 0, b_pitch)
            cp_async_commit()
            all_steps_but_one(column, row, sums, ring, read + from_a, read + from_b)
            cp_async_wait(pending)
            cuda.syncthreads()
            write = read
            if left > 1:  # otherwise this was the last panel, and what is loaded next is not used
                read = int32(read + stage) if read < last_stage else int32(0)
            load(int64(DEPTH), column, row, ring, read + from_a, read + from_b)
            multiply(int64(DEPTH - 1), column, row, sums)
            left = int32(left - 1)
        store_all(c, sums, i0 + y, j0 + x, m, n, c_row, c_column)

    return Kernel(warp_tile, threads=tile.threads, blocks=tile.blocks, architecture="sm_80")


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    multiply_tiles(a, b, c, choose(c.rows, c.columns))


def choose(m: int, n: int) -> Tile:
    """Return the tile that leaves the busiest multiprocessor the least to do for c (m, n)."""
    multiprocessors = gpu_driver.multiprocessors()

    def work(tile: Tile) -> float:
        rounds = -(-tile.count(m, n) // multiprocessors)
        return rounds * tile.rows * tile.columns * tile.instructions

    return min(LARGE, SMALL, key=work)


def multiply_tiles(a: Matrix, b: Matrix, c: Matrix, tile: Tile) -> None:
    """Enqueue c = a b in tiles of this kind."""
    if c.order == "columns":  # rows of the transposed product
        a, b, c = b.T, a.T, c.T
    x, y = operand(a), operand(b.T)
    strides = (pitch(x), pitch(y), c.row_stride, c.column_stride)
    kernel(x.order, y.order, stores_vectors(c), tile).launch(
        (tile.count(c.rows, c.columns),), x.data, y.data, c.data, c.rows, c.columns, a.columns, *strides
    )


RUNG = CudaRung.of_file(
    __name__,
    idea="Square tiles for warps, fragments loaded a step ahead: 1024 of 1117 instructions multiply.",
    dtypes=("float32",),
    compute=compute,
    architecture="sm_80",
)
