"""Attention in CUDA, rung 3: tiles of keys and values in shared memory, for a block's 64 queries.

The idea: neighbouring queries want the same keys. A block takes 64 queries, 8 for each of its warps, and
copies 32 keys and their values to shared memory, where all its warps read them. Then rung 2's online softmax
goes a tile at a time: 32 scores of a query, their largest, one factor exp(old - new), 32 weights.

A lane computes the scores of its own key with the warp's 8 queries, four columns at a time: 4 loads of the
key and 8 of 16 bytes, of the queries, for 32 multiply-adds, and no shuffles. Rows of keys lie one element
further apart than a row is long, so 32 lanes find theirs in 32 banks; a query's are the same for all lanes.
For the product with v a lane has columns again, and gets the weights from the lanes that have them.

Counted, float32: each block reads its queries once, and all keys and values that they see. That is
(2 + 2 keys / 64) numbers for each of the result's, where rung 2 has 2 + 2 keys. No bank conflicts.

Source: Dao, Fu, Ermon, Rudra and Re, FlashAttention, 2022, algorithm 1; Dao, FlashAttention-2, 2023, section
3.1, for the division at the end and the loop over keys inside of a block of queries.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, int32, int64

from ..instructions.copies import load_128
from ..runtime.kernel import Kernel
from ..runtime.matrix import Matrix
from ..tiling.lane_exchange import ALL, lane_exchange
from ..tiling.panels import inlined
from .cuda_attention_rung import CudaAttentionRung

WARPS = 8
OWN = 8  # queries of a warp
QUERIES = WARPS * OWN  # of a block
KEYS = 32  # of a tile, one for each lane
THREADS = 32 * WARPS
WIDEST = 416  # in the 227 KB of shared memory that a block may have


@functools.cache
def kernel(columns: int) -> Kernel:
    """Return the kernel for a width of at most 32 `columns`, of which a lane has so many."""
    largest, summed = lane_exchange(32)
    depth = 32 * columns  # the width, with zeros beyond
    pitch = depth + 1
    k_start = QUERIES * depth
    v_start = k_start + KEYS * pitch
    count, part = OWN * columns, max(4, columns)

    def fill(shared, start, pitch, rows, x, stride, width, first, end, scale):  # type: ignore[no-untyped-def]
        """Copy `rows` rows of x from `first` on, times `scale`, with zeros from row `end` on."""
        c = int32(cuda.threadIdx.x % 32)
        while c < depth:
            for r in range(int32(cuda.threadIdx.x // 32), rows, WARPS):
                inside = c < width and first + r < end
                shared[start + r * pitch + c] = (
                    x[int64(first + r) * stride + c] * scale if inside else float32(0)
                )
            c += int32(32)

    copy = inlined(fill)

    def shared_tiles(q, q_row, k, k_row, v, v_row, out, out_row, logs, width, queries, keys, causal):  # type: ignore[no-untyped-def]
        """Compute 64 rows of the result in a block."""
        shared = cuda.shared.array(0, float32)  # queries, a tile of keys, a tile of values
        sums = cuda.local.array(count, float32)
        scores = cuda.local.array(OWN, float32)  # of the lane's key, then its weights
        tops = cuda.local.array(OWN, float32)
        totals = cuda.local.array(OWN, float32)  # the lane's part
        row_part = cuda.local.array(part, float32)  # of a key, then of its value
        of_q = cuda.local.array(4, float32)
        across = int32((queries + QUERIES - 1) // QUERIES)
        head, i0 = int32(cuda.blockIdx.x // across), int32(cuda.blockIdx.x % across * QUERIES)
        lane, own = int32(cuda.threadIdx.x % 32), int32(cuda.threadIdx.x // 32 * OWN)
        scale = float32(1) / math.sqrt(float32(width))
        q0, q_end = int32(head * queries + i0), int32(head * queries + queries)
        k0, k_end = int32(head * keys), int32(head * keys + keys)
        copy(shared, 0, depth, QUERIES, q, q_row, width, q0, q_end, scale)
        for r in range(OWN):
            tops[r], totals[r] = -1e38, 0  # finite, so that a first score of -inf weighs 0
        for e in range(count):
            sums[e] = 0
        seen = min(keys, i0 + QUERIES) if causal else keys
        for j0 in range(0, seen, KEYS):
            copy(shared, k_start, pitch, KEYS, k, k_row, width, k0 + j0, k_end, float32(1))
            copy(shared, v_start, depth, KEYS, v, v_row, width, k0 + j0, k_end, float32(1))
            cuda.syncthreads()  # the tiles are whole
            for r in range(OWN):
                scores[r] = 0
            for c in range(0, depth, 4):
                for e in range(4):
                    row_part[e] = shared[k_start + lane * pitch + c + e]
                for r in range(OWN):
                    load_128(of_q, 0, shared, (own + r) * depth + c)
                    for e in range(4):
                        scores[r] += row_part[e] * of_q[e]
            j = j0 + lane
            for r in range(OWN):
                if j >= keys or (causal and j > i0 + own + r):
                    scores[r] = -math.inf
                top = max(tops[r], largest(scores[r]))
                shrink = math.exp(tops[r] - top)
                scores[r] = math.exp(scores[r] - top)
                totals[r] = totals[r] * shrink + scores[r]
                tops[r] = top
                for e in range(columns):
                    sums[r * columns + e] *= shrink
            for other in range(KEYS):
                for e in range(columns):
                    row_part[e] = shared[v_start + other * depth + lane + 32 * e]
                for r in range(OWN):
                    weight = cuda.shfl_sync(ALL, scores[r], other)
                    for e in range(columns):
                        sums[r * columns + e] += weight * row_part[e]
            cuda.syncthreads()  # all have read the tiles
        for r in range(OWN):
            total = summed(totals[r])
            row = q0 + own + r
            if row < q_end:
                for e in range(columns):
                    if lane + 32 * e < width:
                        out[int64(row) * out_row + lane + 32 * e] = sums[r * columns + e] / total
                if lane == 0:
                    logs[row] = tops[r] + math.log(total)

    return Kernel(shared_tiles, threads=THREADS, blocks=2)


def compute(q: Matrix, k: Matrix, v: Matrix, out: Matrix, logs: Matrix, heads: int, causal: int) -> None:
    """Enqueue out = softmax(q k^T / sqrt(width)) v, and logs."""
    if q.columns > WIDEST:
        raise ValueError(f"q is {q.columns} wide: rung s3_shared_tiles takes {WIDEST} at most")
    columns, queries, keys = -(-q.columns // 32), q.rows // heads, k.rows // heads
    rows = [part for x in (q, k, v, out) for part in (x.data, x.row_stride)]
    shared = 4 * (QUERIES * 32 * columns + KEYS * (64 * columns + 1))
    blocks = heads * -(-queries // QUERIES)
    kernel(columns).launch((blocks,), *rows, logs.data, q.columns, queries, keys, causal, shared=shared)


RUNG = CudaAttentionRung.of_file(
    __name__,
    idea="Tiles of keys and values in shared memory serve 64 queries, and a lane computes a key's scores.",
    dtypes=("float32",),
    compute=compute,
    room={"shared_tiles": (128, 2, 4 * (64 * 64 + 32 * (65 + 64)))},
)
