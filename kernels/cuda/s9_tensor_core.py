"""Rung 9: tensor cores, which multiply small matrices in one instruction of a warp.

The idea: `mma.sync` (`instructions/warp_fragments.py`) multiplies 16 x 16 by 16 x 8 elements of 16 bits and
sums in float32. That is 2048 multiply-adds, where a warp's plain instruction does 32. To keep the tensor
cores busy, a block with a 128 x 256 tile of c

- has eight warps with 64 x 64 sums each, 128 registers a thread: a slice of k, 16 deep, takes 8 loads of
  fragments for 32 multiplications;
- loads the fragments of the next slice while it multiplies this one, with two sets of registers in turns;
- copies asynchronously into a ring of tiles (`tiling/fragment_tiles.py`): the tile two steps ahead is under
  way while this one is multiplied. One barrier a step says that one tile has arrived and another is free;
- takes tiles in an order that keeps lines of a and b in the L2 cache (`tiling/tile_order.py`).

float32 is multiplied as TF32: factors are rounded to 11 significant bits, sums are still float32.

Tiles are copied as they lie in memory, in rows or in columns. A matrix in neither, or whose rows are not a
multiple of 16 bytes long and apart, is copied first (`packed`), which reads and writes it once. A c in
columns becomes a c in rows by exchanging the operands: c^T = b^T a^T.

Sources: NVIDIA, CUTLASS documentation, "Efficient GEMM in CUDA"; PTX ISA, as in the files named.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .cuda_rung import CudaRung
from .runtime import gpu_driver
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix
from .tiling.packing import aligned_rows, copy_back, packed


@dataclass(frozen=True)
class BlockTile:
    """A block's tile of c, shared out among its warps: warp_rows x WARP_COLUMNS each."""

    warps_down: int
    warps_across: int
    warp_rows: int  # a multiple of 16, at most 64
    stages: int  # tiles of the ring, at least 2

    @property
    def rows(self) -> int:
        """Rows of the block's tile."""
        return self.warps_down * self.warp_rows

    @property
    def columns(self) -> int:
        """Columns of the block's tile."""
        return self.warps_across * WARP_COLUMNS

    @property
    def threads(self) -> int:
        """Threads of the block."""
        return 32 * self.warps_down * self.warps_across

    @property
    def shared(self) -> int:
        """Bytes of shared memory: for each stage 128 bytes of k for each row of a and column of b."""
        return self.stages * 128 * (self.rows + self.columns)


WARP_COLUMNS = 64
LARGE = BlockTile(warps_down=2, warps_across=4, warp_rows=64, stages=3)  # 128 x 256, 144 KB
TIGHT = BlockTile(warps_down=2, warps_across=4, warp_rows=64, stages=2)  # 96 KB: some GPUs give a block 99
SMALL = BlockTile(warps_down=2, warps_across=2, warp_rows=32, stages=3)  # 64 x 128, 72 KB: for small products
GROUP = 16  # rows of tiles done together: 2048 rows of c with large tiles


@functools.cache
def kernel(dtype: str, result: str, a_across: bool, b_across: bool, tile: BlockTile) -> Kernel:
    """Return the kernel for factors of `dtype` and c of dtype `result`, the same or "float32".

    `a_across` says that a's unit stride is along m, across k; `b_across` that b's is along n. The kernel's
    arguments are a, b, c, the non-unit stride of each, m, n, k. Launch one block for each tile.
    """
    from numba import cuda, float32, int32, uint32

    from .instructions import copies
    from .instructions import warp_fragments as warp
    from .tiling.fragment_tiles import LINE, fragment_tile, sums_writer
    from .tiling.tile_order import grouped_tile

    rows, columns, warps_down, warp_rows = tile.rows, tile.columns, tile.warps_down, tile.warp_rows
    source_a, advance_a, copy_a, place_a, read_a, a_words = fragment_tile(
        dtype, "a", rows, a_across, tile.threads
    )
    source_b, advance_b, copy_b, place_b, read_b, b_words = fragment_tile(
        dtype, "b", columns, b_across, tile.threads
    )
    multiply = {
        "float16": warp.mma_m16n8k16_f16,
        "bfloat16": warp.mma_m16n8k16_bf16,
        "float32": warp.mma_m16n8k8_tf32,
    }[dtype]
    write = sums_writer(result, warp_rows, WARP_COLUMNS)
    depth = LINE // (4 if dtype == "float32" else 2)  # of a step
    stage_words = a_words + b_words
    ring_words = tile.stages * stage_words
    ahead = tile.stages - 1  # steps whose copies have begun before they are multiplied
    pending = ahead - 1
    high, wide = warp_rows // 16, WARP_COLUMNS // 8  # of a warp's tile, in multiplications
    half_wide = wide // 2
    a_set, b_set = 4 * high, 2 * wide  # registers of one set of fragments
    a_sets, b_sets = 2 * a_set, 2 * b_set
    all_sums = 4 * high * wide

    @cuda.jit(device=True, forceinline=True)
    def load(part, shared, a_fragments, a_place, b_fragments, b_place):  # type: ignore[no-untyped-def]
        """Load the fragments of a slice into one of the two sets of registers."""
        for x in range(high):
            read_a(a_fragments, part % 2 * a_set + x * 4, shared, a_place, x, part)
        for x in range(half_wide):
            read_b(b_fragments, part % 2 * b_set + x * 4, shared, b_place, x, part)

    @cuda.jit(device=True, forceinline=True)
    def add(part, sums, a_fragments, b_fragments):  # type: ignore[no-untyped-def]
        """Add the products of a slice."""
        for x in range(high):
            for y in range(wide):
                a_at = part % 2 * a_set + x * 4
                b_at = part % 2 * b_set + y * 2
                multiply(sums, (x * wide + y) * 4, a_fragments, a_at, b_fragments, b_at)

    def tensor_core_matmul(a, b, c, a_stride, b_stride, c_stride, m, n, k):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(0, uint32, alignment=128)
        sums = cuda.local.array(all_sums, float32)
        a_fragments = cuda.local.array(a_sets, uint32)
        b_fragments = cuda.local.array(b_sets, uint32)
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & 31)
        warp_number = warp.uniform(thread >> 5)
        warp_row = int32(warp_number % warps_down * warp_rows)
        warp_column = int32(warp_number // warps_down * WARP_COLUMNS)
        i, j = grouped_tile(cuda.blockIdx.x, (m + rows - 1) // rows, (n + columns - 1) // columns, GROUP)
        row = int32(i * rows)
        column = int32(j * columns)
        for e in range(all_sums):
            sums[e] = float32(0)

        # Begin to copy the first tiles. Beyond k they are zeros, so the number of groups is always the same.
        from_a, from_b = source_a(a_stride, row, thread), source_b(b_stride, column, thread)
        p, into = int32(0), int32(0)
        for _ in range(ahead):
            copy_a(shared, into, a, from_a, a_stride, row, m, p, k, thread)
            copy_b(shared, into + a_words, b, from_b, b_stride, column, n, p, k, thread)
            copies.cp_async_commit()
            p, into = int32(p + depth), int32(into + stage_words)
            from_a, from_b = from_a + advance_a(a_stride), from_b + advance_b(b_stride)

        # Slices have a type, int32: Numba compiles a function again for each literal.
        first_a, first_b = place_a(warp_row, lane), int32(a_words + place_b(warp_column, lane))
        here = int32(0)
        copies.cp_async_wait(pending)
        cuda.syncthreads()
        load(int32(0), shared, a_fragments, first_a, b_fragments, first_b)
        for _ in range(0, k, depth):
            at_a, at_b = int32(here + first_a), int32(here + first_b)
            load(int32(1), shared, a_fragments, at_a, b_fragments, at_b)
            copy_a(shared, into, a, from_a, a_stride, row, m, p, k, thread)
            add(int32(0), sums, a_fragments, b_fragments)

            load(int32(2), shared, a_fragments, at_a, b_fragments, at_b)
            copy_b(shared, into + a_words, b, from_b, b_stride, column, n, p, k, thread)
            copies.cp_async_commit()
            add(int32(1), sums, a_fragments, b_fragments)

            load(int32(3), shared, a_fragments, at_a, b_fragments, at_b)
            add(int32(2), sums, a_fragments, b_fragments)

            # The next tile has arrived, for all threads; and all have read the last slice of this one.
            copies.cp_async_wait(pending)
            cuda.syncthreads()
            p, into = int32(p + depth), int32(into + stage_words)
            from_a, from_b = from_a + advance_a(a_stride), from_b + advance_b(b_stride)
            here = int32(here + stage_words)
            if into == ring_words:
                into = int32(0)
            if here == ring_words:
                here = int32(0)
            at_a, at_b = int32(here + first_a), int32(here + first_b)
            load(int32(0), shared, a_fragments, at_a, b_fragments, at_b)
            add(int32(3), sums, a_fragments, b_fragments)

        copies.cp_async_wait(0)
        cuda.syncthreads()
        write(c, c_stride, m, n, row + warp_row, column + warp_column, sums, shared, warp_number, lane)

    return Kernel(tensor_core_matmul, threads=tile.threads, architecture="sm_80")


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    if c.order == "columns":
        compute(b.T, a.T, c.T)
        return
    multiple = 16 // a.itemsize
    a, b = packed(a, multiple, padded=True), packed(b, multiple, padded=True)
    out = aligned_rows(c)
    a_across, b_across = a.order == "columns", b.order == "rows"
    tile = choose(c.rows, c.columns)
    kernel(a.dtype, c.dtype, a_across, b_across, tile).launch(
        (tile_count(c.rows, c.columns, tile),),
        a.data,
        b.data,
        out.data,
        a.column_stride if a_across else a.row_stride,
        b.row_stride if b_across else b.column_stride,
        out.row_stride,
        c.rows,
        c.columns,
        a.columns,
        shared=tile.shared,
    )
    copy_back(out, c)


def choose(m: int, n: int) -> BlockTile:
    """Return the tile that gives the busiest multiprocessor the smallest part of c (m, n)."""
    large = LARGE if gpu_driver.shared_memory() >= LARGE.shared else TIGHT
    multiprocessors = gpu_driver.multiprocessors()

    def part(tile: BlockTile) -> int:
        return -(-tile_count(m, n, tile) // multiprocessors) * tile.rows * tile.columns

    return min((large, SMALL), key=part)  # the large one in a tie


def tile_count(m: int, n: int, tile: BlockTile) -> int:
    """Return how many tiles cover c (m, n)."""
    return -(-m // tile.rows) * -(-n // tile.columns)


RUNG = CudaRung.of_file(
    __name__,
    idea="A tensor core multiplies 16 x 16 by 16 x 8 elements in one instruction, out of a warp's registers.",
    dtypes=("float16", "bfloat16", "float32"),
    compute=compute,
    architecture="sm_80",
    tf32=True,
)
