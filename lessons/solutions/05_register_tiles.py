"""Solutions of lesson 5.

The register tile is that of Volkov 2010, "Better Performance at Lower Occupancy"; the ring of slots with one
barrier a piece is the pipelined loop of NVIDIA's CUTLASS (documentation, "Efficient GEMM in CUDA").
"""

from __future__ import annotations

from numba import cuda, float32

from minidist.kernels.cuda.warp import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    load_128,
    store_128,
)

OWN = 4
SIDE = 16 * OWN
DEPTH = 16
PIECE = 512
SLOTS = 3
RING = SLOTS * PIECE
PENDING = SLOTS - 2


@cuda.jit(device=True)
def fetch(tile, matrix, i0, j0):
    """All 256 threads copy the tile of the matrix that begins at [i0, j0]; zeros beyond the edges."""
    t = cuda.threadIdx.y * 16 + cuda.threadIdx.x
    rows, columns = tile.shape
    for s in range(t, rows * columns, 256):
        i, j = s // columns, s % columns
        inside = i0 + i < matrix.shape[0] and j0 + j < matrix.shape[1]
        tile[i, j] = matrix[i0 + i, j0 + j] if inside else float32(0)


def loads_per_multiply_add(rows, columns):
    """Loads from shared memory for each multiply-add of a thread with rows x columns sums."""
    return (rows + columns) / (rows * columns)


@cuda.jit
def register_tile(a, b, c):
    """c = a b: a thread computes OWN x OWN elements, 16 rows and 16 columns apart."""
    tile_a = cuda.shared.array((SIDE, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, SIDE), float32)
    sums = cuda.local.array((OWN, OWN), float32)
    column = cuda.local.array(OWN, float32)  # of tile_a
    row = cuda.local.array(OWN, float32)  # of tile_b
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE  # where the block's tile of c begins
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        for q in range(DEPTH):
            for e in range(OWN):
                column[e] = tile_a[y + 16 * e, q]
                row[e] = tile_b[q, x + 16 * e]
            for e in range(OWN):  # each with each: OWN * OWN multiply-adds for 2 * OWN loads
                for f in range(OWN):
                    sums[e, f] += column[e] * row[f]
        cuda.syncthreads()
    for e in range(OWN):
        for f in range(OWN):
            i, j = i0 + y + 16 * e, j0 + x + 16 * f
            if i < c.shape[0] and j < c.shape[1]:
                c[i, j] = sums[e, f]


@cuda.jit
def axpy(alpha, x, y):
    """y = alpha x + y: a thread for four elements, 16 bytes at a time."""
    four_x = cuda.local.array(4, float32)
    four_y = cuda.local.array(4, float32)
    i = 4 * cuda.grid(1)
    if i + 4 <= x.size:
        load_128(four_x, 0, x, i)
        load_128(four_y, 0, y, i)
        for e in range(4):
            four_y[e] += alpha * four_x[e]
        store_128(y, i, four_y, 0)
    else:  # the last one to three elements; for threads beyond them the range is empty
        for e in range(i, x.size):
            y[e] += alpha * x[e]


@cuda.jit
def ring_backwards(x, y):
    """Turn each piece of x around, into y: while one is turned the next ones are copied."""
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(pieces):
        cp_async_wait(PENDING)  # this thread's part of the piece is there
        cuda.syncthreads()  # everybody's is; and everybody has used the piece before, whose slot is next
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()  # a group for each piece, empty at the end, so that the wait counts right
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]
