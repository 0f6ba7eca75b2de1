"""A solution of each problem of `minidist judge`; what it costs is par.

minidist judge examples/judge/pars.py
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, float32, int32

from minidist.kernels import rung
from minidist.kernels.cuda.attention import load
from minidist.kernels.cuda.emulator import launch
from minidist.kernels.cuda.runtime.matrix import host_matrix
from minidist.kernels.cuda.warp import load_128, store_128

ALL = 0xFFFFFFFF  # lanes of a warp
TILE, PADDED, THREADS, WARPS = 32, 33, 256, 8


def add(x, y, out):
    """16 bytes at a time (lesson 5)."""
    launch(add_fours, -(-x.size // (4 * THREADS)), THREADS, x, y, out)


@cuda.jit
def add_fours(x, y, out):
    four_x, four_y = cuda.local.array(4, float32), cuda.local.array(4, float32)
    i = 4 * cuda.grid(1)
    if i + 4 <= x.size:
        load_128(four_x, 0, x, i)
        load_128(four_y, 0, y, i)
        for e in range(4):
            four_x[e] += four_y[e]
        store_128(out, i, four_x, 0)
    else:
        for e in range(i, x.size):
            out[e] = x[e] + y[e]


def transpose(a, out):
    """Through a padded tile in shared memory (lesson 4); a thread moves four elements."""
    m, n = a.shape
    launch(transpose_tile, (-(-n // TILE), -(-m // TILE)), (TILE, 8), a, out)


@cuda.jit
def transpose_tile(a, out):
    tile = cuda.shared.array((TILE, PADDED), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    for r in range(y, TILE, 8):
        if i0 + r < a.shape[0] and j0 + x < a.shape[1]:
            tile[r, x] = a[i0 + r, j0 + x]
    cuda.syncthreads()
    for r in range(y, TILE, 8):
        if j0 + r < out.shape[0] and i0 + x < out.shape[1]:
            out[j0 + r, i0 + x] = tile[x, r]


@cuda.jit(device=True)
def warp_sum(x):
    for step in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(ALL, x, step)
    return x


def reduction(x, out):
    """A thread adds up its share, then a warp by shuffles, a block in shared memory, and all by an atomic."""
    launch(reduce, min(32, -(-x.size // THREADS)), THREADS, x, out)


@cuda.jit
def reduce(x, out):
    sums = cuda.shared.array(WARPS, float32)
    t, four, total = cuda.threadIdx.x, cuda.local.array(4, float32), float32(0)
    for i in range(4 * cuda.grid(1), x.size, 4 * cuda.gridsize(1)):
        if i + 4 <= x.size:
            load_128(four, 0, x, i)
            total += (four[0] + four[1]) + (four[2] + four[3])
        else:
            for e in range(i, x.size):
                total += x[e]
    total = warp_sum(total)
    if t % 32 == 0:
        sums[t // 32] = total
    cuda.syncthreads()
    if t < 32:
        total = warp_sum(sums[t] if t < WARPS else float32(0))
        if t == 0:
            cuda.atomic.add(out, 0, total)


def scan(x, out):
    """A block a row, 256 elements at a time: scans of warps by shuffles, then of their sums."""
    launch(scan_row, x.shape[0], THREADS, x, out)


@cuda.jit(device=True)
def warp_scan(x, lane):
    for step in (1, 2, 4, 8, 16):
        before = cuda.shfl_up_sync(ALL, x, step)
        if lane >= step:
            x += before
    return x


@cuda.jit
def scan_row(x, out):
    sums = cuda.shared.array((2, WARPS), float32)
    i, t, carry, turn = cuda.blockIdx.x, cuda.threadIdx.x, float32(0), 0
    lane, warp, n = t % 32, t // 32, x.shape[1]
    for j0 in range(0, n, THREADS):
        j = j0 + t
        own = warp_scan(x[i, j] if j < n else float32(0), lane)
        if lane == 31:
            sums[turn, warp] = own
        cuda.syncthreads()
        of_warps = warp_scan(sums[turn, lane] if lane < WARPS else float32(0), lane)
        before = cuda.shfl_sync(ALL, of_warps, max(warp - 1, 0))
        if j < n:
            out[i, j] = carry + own + (before if warp > 0 else float32(0))
        carry += cuda.shfl_sync(ALL, of_warps, WARPS - 1)
        turn = 1 - turn  # so that one barrier is enough


def histogram(x, out):
    """Each block counts in shared memory, and adds its counts to everybody's."""
    launch(count, min(8, -(-x.size // THREADS)), THREADS, x, out)


@cuda.jit
def count(x, out):
    counts = cuda.shared.array(256, int32)
    t = cuda.threadIdx.x
    counts[t] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(counts, x[i], 1)
    cuda.syncthreads()
    if counts[t] > 0:
        cuda.atomic.add(out, t, counts[t])


def softmax(x, out):
    """A warp a row: maximum and sum in one pass, and a second to write."""
    launch(softmax_rows, -(-x.shape[0] // 4), 128, x, out)


@cuda.jit
def softmax_rows(x, out):
    i, lane = cuda.blockIdx.x * 4 + cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    if i < x.shape[0]:
        top, total = float32(-math.inf), float32(0)
        for j in range(lane, x.shape[1], 32):
            value = x[i, j]
            higher = max(top, value)
            total = total * math.exp(top - higher) + math.exp(value - higher)
            top = higher
        own = top
        for step in (16, 8, 4, 2, 1):
            top = max(top, cuda.shfl_xor_sync(ALL, top, step))
        total = warp_sum(total * math.exp(own - top))
        for j in range(lane, x.shape[1], 32):
            out[i, j] = math.exp(x[i, j] - top) / total


def matmul(a, b, out):
    """The ladder's."""
    rung("s6_vector_loads").matmul(a, b, out=out)


def matmul_f16(a, b, out):
    """The ladder's."""
    rung("s9_tensor_core").matmul(a, b.T, out=out)


def attention(q, k, v, out):
    """The ladder's, with tiles in shared memory."""
    ladders("s3_shared_tiles", q, k, v, out, causal=False)


def attention_causal(q, k, v, out):
    """The ladder's, on tensor cores."""
    ladders("s4_tensor_core", q, k, v, out, causal=True)


def ladders(name, q, k, v, out, causal):
    heads, positions, width = q.shape
    rows = [host_matrix(x.reshape(-1, width), q.dtype.name) for x in (q, k, v, out)]
    logs = host_matrix(np.empty((heads * positions, 1), np.float32), "float32")
    load(name).compute(*rows, logs, heads, int(causal))
