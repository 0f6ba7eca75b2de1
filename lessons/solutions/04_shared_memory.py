"""Solutions of lesson 4.

The product with tiles is that of the CUDA C++ Programming Guide, section "Shared Memory"; the padded tile is
from Ruetsch and Micikevicius 2009, "Optimizing Matrix Transpose in CUDA".
"""

from __future__ import annotations

from numba import cuda, float32

TILE = 16


@cuda.jit
def backwards(x, y):
    """Turn each piece of 128 elements of x around, into y."""
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        tile[t] = x[start + t]
        cuda.syncthreads()  # the tile is whole
        y[start + t] = tile[127 - t]
        cuda.syncthreads()  # all have read it: the next piece may come


def reads(m, n, k, tile):
    """Elements that all threads together read from global memory, for a (m x k) times b (k x n)."""
    across, down = -(-n // tile), -(-m // tile)  # tiles of c: how often a and b are read
    return m * k * across + k * n * down


@cuda.jit
def tiled_matmul(a, b, c):
    """c = a b: blocks of TILE x TILE threads, each for a tile of c."""
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.blockIdx.x * TILE + x, cuda.blockIdx.y * TILE + y
    m, n, k = c.shape[0], c.shape[1], a.shape[1]
    total = float32(0)
    for p in range(0, k, TILE):
        tile_a[y, x] = a[i, p + x] if i < m and p + x < k else float32(0)
        tile_b[y, x] = b[p + y, j] if p + y < k and j < n else float32(0)
        cuda.syncthreads()  # the tiles are whole
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[q, x]
        cuda.syncthreads()  # all have read them
    if i < m and j < n:
        c[i, j] = total


def passes(stride):
    """Passes that a warp's load from shared memory takes whose thread t reads word t * stride."""
    words = {t * stride for t in range(32)}  # threads that want the same word share it
    banks = [word % 32 for word in words]
    return max(banks.count(bank) for bank in banks)


@cuda.jit
def transpose(a, out):
    """out = a.T: along rows in global memory both times, and across in shared memory."""
    tile = cuda.shared.array((32, 33), float32)  # a word of padding: a column lies in 32 banks
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.blockIdx.x * 32 + x, cuda.blockIdx.y * 32 + y
    if i < a.shape[0] and j < a.shape[1]:
        tile[y, x] = a[i, j]
    cuda.syncthreads()
    i = cuda.blockIdx.x * 32 + y  # the row of out: a column of a
    j = cuda.blockIdx.y * 32 + x
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = tile[x, y]
