"""Attention in CUDA, rung 5: the backward pass on tensor cores, which computes the weights again.

The idea: no kernel ever had the weights p in one place, but with the `logs` of forward they are exp(score -
logs): the product q k^T again, without a softmax. With delta the sums of d_out * out along rows, and ds = p
(d_out v^T - delta), the gradients are dq = ds k, dk = ds^T q and dv = p^T d_out.

One kernel runs twice. By queries, a block's own tiles are q and d_out, k and v come in turns, and dq adds up
in registers; delta, the diagonal of d_out out^T, is left in pairs with logs. By keys, q, d_out and the pairs
come, and scores are transposed, so that p^T and ds^T are left factors. One launch with atomics for dq takes 5
products for these 7, and as many bytes (4 for dq where k and v have 2 each), but it adds in another order
each time. Here the same numbers give the same bits.

Source: Dao, FlashAttention-2, 2023, section 3.1.2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import cuda, float32, int32, uint32
from numba.cuda import libdevice

from ..instructions.copies import cp_async_16, cp_async_commit, cp_async_wait, load_128
from ..runtime.kernel import Kernel
from ..tiling.packing import aligned_rows, copy_back, scratch
from ..tiling.panels import inlined, unrolled
from .cuda_attention_rung import CudaAttentionRung
from .products import EVERYONE, INFINITY, LOG2_E, SIDE, THREADS, WORDS, in_chunks, parts_of, products
from .s4_tensor_core import RUNG as FORWARD


@functools.cache
def kernel(dtype: str, causal: bool, parts: int, by_keys: bool) -> Kernel:
    """Return the kernel for blocks of keys, or of queries. Launch heads x tiles."""
    copy, along, hide, pack, across, store = products(dtype, parts)
    tile, count = parts * WORDS, parts * 32  # words; sums of a lane

    @inlined
    def weigh(y, scores, slopes, pairs, scale, shared, at):  # type: ignore[no-untyped-def]
        """Make weights of 8 columns of scores, and in `slopes` gradients of scores of those of weights."""
        if by_keys:
            load_128(pairs, 0, shared, at + y * 16)
        for e in range(y * 4, y * 4 + 4):
            pair = e % 2 * 2 if by_keys else e // 2 % 2 * 2
            scores[e] = libdevice.exp2f(scores[e] * (scale * float32(LOG2_E)) - pairs[pair])
            slopes[e] = scores[e] * (slopes[e] * scale - pairs[pair + 1])

    @inlined
    def leave(r, pairs, products, diagonal, left, logs, at, stats, to, scale, lane):  # type: ignore[no-untyped-def]
        """Make a row's pair, and leave it for the launch by keys; beyond the last query weights become 0."""
        delta = float32(0)
        for e in range(32):
            if e // 2 % 2 == r and e // 4 * 8 + e % 2 - r * 8 == diagonal:
                delta = products[e] * scale
        delta += cuda.shfl_xor_sync(EVERYONE, delta, 1)
        delta += cuda.shfl_xor_sync(EVERYONE, delta, 2)
        pairs[r * 2] = logs[at + r * 8] * float32(LOG2_E) if r * 8 < left else float32(INFINITY)
        pairs[r * 2 + 1] = delta
        if lane % 4 < 2:
            stats[to + r * 16 + lane % 4] = pairs[r * 2] if lane % 4 == 0 else delta

    weigh_all, leave_rows = unrolled(weigh, 8), unrolled(leave, 2)

    def backward(x, y, over_x, over_y, out, logs, stats, dx, dy, pitch, own, others, padded, width):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(0, uint32, alignment=128)
        scores, slopes = cuda.local.array(32, float32), cuda.local.array(32, float32)
        dx_sums, dy_sums = cuda.local.array(count, float32), cuda.local.array(count, float32)
        pairs, factors = cuda.local.array(4, float32), cuda.local.array(16, uint32)
        thread, head = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane, warp = int32(thread % 32), int32(thread // 32)
        i0 = int32((cuda.blockIdx.y if by_keys else cuda.gridDim.y - 1 - cuda.blockIdx.y) * SIDE)
        i, row, last = int32(i0 + warp * 16 + lane // 4), int32(head * own + i0), int32((head + 1) * own)
        start, scale = int32(i0 if causal and by_keys else 0), float32(1) / math.sqrt(float32(width))
        end = int32(min(others, i0 + SIDE) if causal and not by_keys else others)
        for e in range(count):
            dx_sums[e] = dy_sums[e] = 0
        here, there, j0 = int32(2 * tile), int32(4 * tile + 2 * SIDE), int32(start - SIDE)
        copy(shared, int32(0), x, pitch, row, last, width, thread)
        copy(shared, int32(tile), y, pitch, row, last, width, thread)
        if not by_keys:
            copy(shared, here, out, pitch, row, last, width, thread)
        cp_async_commit()
        while j0 < end:
            cp_async_wait(0)
            cuda.syncthreads()
            next_j = int32(j0 + SIDE)
            if next_j < end:
                over, over_last = int32(head * others + next_j), int32((head + 1) * others)
                copy(shared, there, over_x, pitch, over, over_last, width, thread)
                copy(shared, there + tile, over_y, pitch, over, over_last, width, thread)
                if by_keys and thread < SIDE // 2:
                    at = 2 * (head * padded + next_j) + thread * 4
                    cp_async_16(shared, there + 2 * tile + thread * 4, stats, at)
                cp_async_commit()
            if j0 >= start:
                along(scores, shared, int32(0), here, warp, lane)
                along(slopes, shared, int32(tile), here + tile, warp, lane)
                if j0 == i0 if causal else next_j > others and not by_keys:
                    first = int32(j0 + lane % 4 * 2)
                    hide(scores, SIDE if by_keys else others - first, i - first if causal else SIDE, by_keys)
                weigh_all(scores, slopes, pairs, scale, shared, here + 2 * tile + lane % 4 * 4)
                if by_keys:
                    pack(factors, scores)
                    across(dy_sums, factors, shared, here + tile, lane)
                pack(factors, slopes)
                across(dx_sums, factors, shared, here, lane)
            elif not by_keys:  # y is d_out, and `out` lies here
                along(scores, shared, int32(tile), here, warp, lane)
                at, to = int32(row + i - i0), 2 * (head * padded + i)
                leave_rows(pairs, scores, i - i0 - lane % 4 * 2, own - i, logs, at, stats, to, scale, lane)
            here, there, j0 = there, here, next_j
        store(dx, pitch, last, width, row + warp * 16, dx_sums, shared, warp, lane)
        if by_keys:
            store(dy, pitch, last, width, row + warp * 16, dy_sums, shared, warp, lane)

    return Kernel(backward, threads=THREADS, architecture="sm_80")


def gradients(*arguments: Any) -> None:
    """Enqueue dq, dk and dv, given q, k, v, out, logs, d_out, these three, heads and causal."""
    q, k, v, out, logs, d_out, *results, heads, causal = arguments
    queries, keys, width, dtype = q.rows // heads, k.rows // heads, q.columns, q.dtype
    q, k, v, out, d_out = map(in_chunks, (q, k, v, out, d_out))
    dq, dk, dv = made = [aligned_rows(x) for x in results]
    parts, padded = parts_of(width), -(-queries // SIDE) * SIDE
    stats = scratch(1, heads * padded * 2, "float32", 4).data
    for by_keys, arrays, into, own, others in (
        (False, (q, d_out, k, v), (dq.data, dq.data), queries, keys),
        (True, (k, v, q, d_out), (dk.data, dv.data), keys, queries),
    ):
        run, grid = kernel(dtype, bool(causal), parts, by_keys).launch, (heads, -(-own // SIDE))
        sizes = (width + -width % 8, own, others, padded, width)
        run(grid, *arrays, out, logs.data, stats, *into, *sizes, shared=24 * parts * WORDS + 16 * SIDE)
    for x, result in zip(made, results, strict=True):
        copy_back(x, result)


RUNG = CudaAttentionRung.of_file(
    __name__,
    idea="Backward on tensor cores: weights are computed again, and each tile's gradients stay in registers.",
    dtypes=("float16", "bfloat16"),
    compute=FORWARD.compute,
    gradients=gradients,
    architecture="sm_80",
    room={**FORWARD.room, "backward": (255, 2, 6 * 64 * 128 + 2 * 64 * 8)},  # six tiles, logs and deltas
)
