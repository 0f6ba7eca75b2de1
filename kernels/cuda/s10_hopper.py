"""Rung 10: the copy engine, matrix instructions that read shared memory, and warp groups with one job each.

The idea: in rung 9 everything passes through registers before it is multiplied, and every warp also computes
addresses and copies. On Hopper neither is necessary:

- One thread, the producer, tells the copy engine (`instructions/tma.py`) which boxes of a and b come next, up
  to four steps of 64 of k ahead. Elements outside a matrix arrive as zeros, so no size is a special case.
- Two warp groups, the consumers, start multiplications (`instructions/wgmma.py`) of tiles in shared memory.
  Each has 64 rows of the block's 128 x 256 tile: 128 sums a thread, for which the producer's warp group gives
  up its registers (setmaxnreg). Both read the same part of b.
- Producer and consumers wait for each other by mbarriers (`instructions/barriers.py`): a slot of the ring is
  full when its bytes have arrived, and empty when all its readers have multiplied it.
- Two blocks on neighbouring multiprocessors form a cluster. They have the same columns of b, and each loads
  half of them for both (multicast): 32 KB a step and block from the L2 cache instead of 48. The tensor cores
  of a multiprocessor do 2048 multiply-adds a clock, so a step lasts 1024 clocks: 32 bytes a clock, not 48.
- Blocks stay, one a multiprocessor, and take tile after tile (`tiling/tile_order.py`). While the consumers
  round and store their sums (`tiling/wgmma_store.py`), the producer loads the next tile.

A c in columns becomes a c in rows by exchanging the operands: c^T = b^T a^T. A matrix that is not in rows or
columns a multiple of 16 bytes apart is copied: a and b before (`packed`), c after.

Sources: NVIDIA, CUTLASS documentation, "Efficient GEMM in CUDA" (warp specialisation); PTX ISA, as in the
files named; NVIDIA H100 Tensor Core GPU Architecture (2022), for the rates.
"""

from __future__ import annotations

import functools

from .cuda_rung import CudaRung
from .runtime import gpu_driver
from .runtime.kernel import Kernel
from .runtime.matrix import Matrix, TensorMap
from .tiling.packing import aligned_rows, copy_back, packed

ROWS = 128  # of a block's tile: 64 for each consumer
COLUMNS = (256, 128)  # of a tile: the most that one wgmma takes, and for products with few tiles
DEPTH = 64  # of a step in k: 128 bytes, the widest swizzle
CLUSTER = 2  # blocks below each other that share their columns of b: 1, 2, or 4 with COLUMNS = (256,)
CONSUMERS = 2  # warp groups that multiply
BEHIND = 1  # steps that may still be multiplying when the next begins; 0 waits for each
BUFFERS = 2  # of 64 lines of 128 bytes, for each consumer's stores: 1, 2, or 4 with COLUMNS = (256,)
SHARED = 225 * 1024  # bytes that a block may ask for: of 227 KB, mbarriers and alignment take up to 2
GROUP = 8  # rows of cluster tiles done together: 8 x 2 x 128 = 2048 rows
THREADS = 128 * (1 + CONSUMERS)
# Registers of a thread after the exchange. 384 threads begin with 168 each: 65536 / 384, in steps of 8. Since
# 40 + 2 * 232 = 3 * 168, none is left over; asking for more would wait for ever.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
BOX = 64  # elements, 128 bytes
BOX_BYTES = BOX * 128  # of 64 lines
OUT_BYTES = CONSUMERS * BUFFERS * BOX_BYTES


@functools.cache
def kernel(dtype: str, result: str, a_across: bool, b_across: bool, columns: int) -> Kernel:
    """Return the kernel for "float16" or "bfloat16" factors, and c of that dtype or "float32".

    `a_across` says that a's unit stride is along m, across k; `b_across` that b's is along n. The kernel's
    arguments are tensor maps of a, b and c, then m, n and k. Any number of clusters of CLUSTER blocks will
    do.
    """
    from numba import cuda, float32, int32, int64, uint32, uint64

    from .instructions import barriers as sync
    from .instructions import tma, wgmma
    from .instructions.warp_fragments import elect_one, uniform
    from .tiling.tile_order import grouped_tile
    from .tiling.wgmma_store import slab_writer

    kind = "bf16" if dtype == "bfloat16" else "f16"
    multiply, fence, wait = wgmma.warp_group_multiply(columns, kind, a_across, b_across)
    write_slab, slab_columns = slab_writer(result)
    slots = stages(columns)
    barriers_all = 2 * slots  # full ones, then empty ones
    readers = CONSUMERS * CLUSTER  # that arrive at an empty one
    everyone = (1 << CLUSTER) - 1  # a bit for each block of the cluster
    sums_each = columns // 2
    share = columns // CLUSTER  # of b's columns, that one block loads
    others = BUFFERS - 1
    # Indices into shared memory count words of 32 bits.
    a_words, share_words, box_words = ROWS * DEPTH // 2, share * DEPTH // 2, BOX_BYTES // 4
    slot_words = a_words + CLUSTER * share_words
    slot_bytes = 4 * slot_words
    # Along k one box holds all rows; across k it holds 64 of them.
    a_boxes, a_rows = (ROWS // BOX, BOX) if a_across else (1, ROWS)
    b_boxes, b_rows = (share // BOX, BOX) if b_across else (1, share)
    # Descriptors count 16 bytes. 16 of k are 16 lines of 128 bytes, or 32 bytes of a line.
    a_step, b_step = 128 if a_across else 2, 128 if b_across else 2
    a_leading, b_leading = BOX_BYTES if a_across else 16, BOX_BYTES if b_across else 16
    slot_step = slot_bytes // 16

    def hopper_matmul(a, b, c, m, n, k):  # type: ignore[no-untyped-def]
        barriers = cuda.shared.array(barriers_all, uint64)
        shared = cuda.shared.array(0, uint32, alignment=1024)
        thread = int32(cuda.threadIdx.x)
        warp_group = uniform(thread >> 7)
        rank = sync.cluster_rank()
        tile_rows = int32((m + CLUSTER * ROWS - 1) // (CLUSTER * ROWS))  # a tile of the cluster
        tile_columns = int32((n + columns - 1) // columns)
        tiles = int32(tile_rows * tile_columns)
        first_tile = int32(cuda.blockIdx.x // CLUSTER)
        clusters = int32(cuda.gridDim.x // CLUSTER)
        steps = int32((k + DEPTH - 1) // DEPTH)
        if thread == 0:
            for s in range(slots):
                sync.mbarrier_init(barriers, s, 1)
                sync.mbarrier_init(barriers, slots + s, readers)
            sync.fence_mbarrier_init()
        sync.cluster_arrive()
        sync.cluster_wait()

        # Producer and consumers go through the same tiles, steps and slots; `parity` changes with each turn
        # of the ring. The phase before an mbarrier's first has parity 1 and counts as over.
        if warp_group == 0:
            wgmma.setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread < 32 and elect_one():
                tma.tensor_map_acquire(a)
                tma.tensor_map_acquire(b)
                slot, parity = int32(0), int32(0)
                for tile in range(first_tile, tiles, clusters):
                    i, j = grouped_tile(tile, tile_rows, tile_columns, GROUP)
                    row = int32((i * CLUSTER + rank) * ROWS)
                    column = int32(j * columns + rank * share)
                    for step in range(steps):
                        p = int32(step * DEPTH)
                        here = int32(slot * slot_words)
                        sync.mbarrier_wait(barriers, slots + slot, parity ^ 1)
                        sync.mbarrier_expect(barriers, slot, slot_bytes)
                        for box in range(a_boxes):
                            x, y = (row + box * a_rows, p) if a_across else (p, row)
                            tma.tma_load_2d(shared, here + box * box_words, a, x, y, barriers, slot)
                        here = int32(here + a_words + rank * share_words)
                        for box in range(b_boxes):
                            x, y = (column + box * b_rows, p) if b_across else (p, column)
                            tma.tma_load_2d_multicast(
                                shared, here + box * box_words, b, x, y, barriers, slot, everyone
                            )
                        slot = int32(slot + 1)
                        if slot == slots:
                            slot, parity = int32(0), int32(parity ^ 1)
        else:
            wgmma.setmaxnreg_inc(CONSUMER_REGISTERS)
            sums = cuda.local.array(sums_each, float32)
            consumer = int32(warp_group - 1)
            member = int32(thread & 127)
            a_first = wgmma.descriptor(shared, consumer * box_words, a_leading, 1024)
            b_first = wgmma.descriptor(shared, a_words, b_leading, 1024)
            out = int32(slots * slot_words + consumer * (BUFFERS * box_words))
            if member == 0:
                tma.tensor_map_acquire(c)
            slot, parity, before = int32(0), int32(0), int32(0)
            for tile in range(first_tile, tiles, clusters):
                for step in range(steps):
                    sync.mbarrier_wait(barriers, slot, parity)
                    a_here = a_first + int64(slot * slot_step)
                    b_here = b_first + int64(slot * slot_step)
                    fence(sums)
                    multiply(sums, a_here, b_here, step)  # the first of a tile begins from zero
                    multiply(sums, a_here + a_step, b_here + b_step, 1)
                    multiply(sums, a_here + 2 * a_step, b_here + 2 * b_step, 1)
                    multiply(sums, a_here + 3 * a_step, b_here + 3 * b_step, 1)
                    wgmma.wgmma_commit()
                    wait(sums, BEHIND)
                    # The step before has been multiplied: its slot is empty, for all blocks that write to it.
                    if (BEHIND == 0 or step > 0) and member < CLUSTER:
                        sync.mbarrier_arrive_at(barriers, slots + (before if BEHIND else slot), member)
                    before = slot
                    slot = int32(slot + 1)
                    if slot == slots:
                        slot, parity = int32(0), int32(parity ^ 1)
                if BEHIND:
                    wait(sums, 0)
                    if member < CLUSTER:
                        sync.mbarrier_arrive_at(barriers, slots + before, member)
                # The sums leave in slabs of 64 lines of 128 bytes, from one buffer after the other.
                i, j = grouped_tile(tile, tile_rows, tile_columns, GROUP)
                row = int32((i * CLUSTER + rank) * ROWS + consumer * 64)
                for slab in range(columns // slab_columns):
                    column = int32(j * columns + slab * slab_columns)
                    buffer = int32(out + slab % BUFFERS * box_words)
                    if member == 0:
                        tma.tma_store_wait_read(others)
                    sync.barrier_sync(1 + consumer, 128)
                    write_slab(shared, buffer, sums, slab, member)
                    sync.fence_proxy_async()
                    sync.barrier_sync(1 + consumer, 128)
                    if member == 0:
                        tma.tma_store_2d(c, column, row, shared, buffer)
                        tma.tma_store_commit()
            if member == 0:
                tma.tma_store_wait(0)
        # A block stays while others may still write to its memory, or arrive at its mbarriers.
        sync.cluster_arrive()
        sync.cluster_wait()

    return Kernel(hopper_matmul, threads=THREADS, architecture="sm_90a")


def compute(a: Matrix, b: Matrix, c: Matrix) -> None:
    """Enqueue c = a b."""
    if c.order == "columns":
        compute(b.T, a.T, c.T)
        return
    a, b = packed(a, 8), packed(b, 8)
    out = aligned_rows(c)
    a_across, b_across = a.order == "columns", b.order == "rows"
    available = max(1, gpu_driver.multiprocessors() // CLUSTER)
    tiles = {columns: -(-c.rows // (CLUSTER * ROWS)) * -(-c.columns // columns) for columns in COLUMNS}
    turns = {columns: -(-tiles[columns] // available) for columns in COLUMNS}
    columns = min(COLUMNS, key=lambda columns: turns[columns] * columns)
    # The fewest clusters that need no more turns: 1024 tiles take 16 turns with 66 clusters, or with 64.
    clusters = -(-tiles[columns] // turns[columns])
    kernel(a.dtype, c.dtype, a_across, b_across, columns).launch(
        (clusters * CLUSTER,),
        tensor_map(a.T if a_across else a, BOX if a_across else ROWS),
        tensor_map(b if b_across else b.T, BOX if b_across else columns // CLUSTER),
        tensor_map(out, 64),
        *(c.rows, c.columns, a.columns),
        shared=stages(columns) * stage_bytes(columns) + OUT_BYTES,
        cluster=CLUSTER,
    )
    copy_back(out, c)


def stage_bytes(columns: int) -> int:
    """Return the bytes of a step's tiles of a and b."""
    return 2 * DEPTH * (ROWS + columns)


def stages(columns: int) -> int:
    """Return how many slots of the ring fit beside the buffers for c."""
    return (SHARED - OUT_BYTES) // stage_bytes(columns)


def tensor_map(x: Matrix, box_rows: int) -> TensorMap:
    """Return the tensor map of a matrix in rows, with boxes 128 bytes wide."""
    return TensorMap(x.data, x.rows, x.columns, x.row_stride, box_rows, 128 // x.itemsize, x.dtype)


RUNG = CudaRung.of_file(
    __name__,
    idea="A copy engine fills shared memory, matrix instructions read it, and each warp group has one job.",
    dtypes=("float16", "bfloat16"),
    compute=compute,
    architecture="sm_90a",
)
