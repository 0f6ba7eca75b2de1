"""Attention in CUDA, rung 2: online softmax; a warp takes a query, and no scores are stored.

The idea: a warp goes over the keys one by one, and keeps the largest score so far, the sum of
exp(score - largest), and the sum of the values with these weights. When a larger score comes, both sums were
made with the old largest: a factor exp(old - new) makes them right. One division at the end makes the sums
what the softmax says. Nothing of queries x keys is in memory, and one kernel does it all.

The width is spread over the lanes: lane l has columns l, l + 32, ... of the query, of each key and value, and
of the result. So 32 lanes read 32 neighbours. A score is the sum of the lanes' products, which they exchange
by shuffles (`tiling/lane_exchange.py`), so that each lane has it. A causal query stops at its own position.

Counted, float32, width 64: 4 sectors for each load, where rung 1 has 9.8. Each query reads all keys and
values: 64 times the bytes that q, k, v and the result have at 128 positions.

Sources: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Rabe and Staats,
Self-attention does not need O(n^2) memory, 2021.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, int32

from ..runtime.kernel import Kernel
from ..runtime.matrix import Matrix
from ..tiling.lane_exchange import lane_exchange
from .cuda_attention_rung import CudaAttentionRung

WARPS = 4  # of a block, each with a query


@functools.cache
def kernel(columns: int) -> Kernel:
    """Return the kernel for a width of at most 32 `columns`, of which a lane has so many."""
    _, summed = lane_exchange(32)

    def warp_rows(q, k, v, out, logs, queries, keys, causal):  # type: ignore[no-untyped-def]
        """Compute one row of the result in a warp."""
        own = cuda.local.array(columns, float32)  # of the query
        sums = cuda.local.array(columns, float32)
        lane = int32(cuda.threadIdx.x % 32)
        row = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        width = int32(q.shape[1])
        if row < q.shape[0]:
            first, i = int32(row // queries * keys), int32(row % queries)
            for e in range(columns):
                c = lane + 32 * e
                own[e] = q[row, c] / math.sqrt(float32(width)) if c < width else float32(0)
                sums[e] = 0
            top, total = float32(-1e38), float32(0)  # finite, so that a first score of -inf weighs 0
            for j in range(first, first + (i + 1 if causal else keys)):
                score = float32(0)
                for e in range(columns):
                    c = lane + 32 * e
                    if c < width:
                        score += own[e] * k[j, c]
                score = summed(score)
                largest = max(top, score)
                shrink, weight = math.exp(top - largest), math.exp(score - largest)
                total = total * shrink + weight
                for e in range(columns):
                    c = lane + 32 * e
                    if c < width:
                        sums[e] = sums[e] * shrink + weight * v[j, c]
                top = largest
            for e in range(columns):
                c = lane + 32 * e
                if c < width:
                    out[row, c] = sums[e] / total
            if lane == 0:
                logs[row] = top + math.log(total)

    return Kernel(warp_rows, threads=32 * WARPS)


def compute(q: Matrix, k: Matrix, v: Matrix, out: Matrix, logs: Matrix, heads: int, causal: int) -> None:
    """Enqueue out = softmax(q k^T / sqrt(width)) v, and logs."""
    views = [x.view2d() for x in (q, k, v, out)]
    sizes = (q.rows // heads, k.rows // heads, causal)
    kernel(-(-q.columns // 32)).launch((-(-q.rows // WARPS),), *views, logs.data, *sizes)


RUNG = CudaAttentionRung.of_file(
    __name__,
    idea="Online softmax: a warp takes a query, a larger score rescales the sums, and no scores are stored.",
    dtypes=("float32",),
    compute=compute,
    room={"warp_rows": (72, 7, 0)},
)
