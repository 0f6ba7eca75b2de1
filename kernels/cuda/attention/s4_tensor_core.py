"""Attention in CUDA, rung 4: tensor cores for both products, and the softmax in registers.

The idea: `mma.sync` leaves a warp's 16 rows of scores in registers, four lanes to a row (`products.py`). So a
row's largest score takes two shuffles, and no score passes through memory. Rounded to 16 bits in pairs, a
register of weights is one of the next product's left factor: same lane, same elements. A block has 64
queries, 16 for each of its warps, and no warp waits for another's scores.

- exp(x / sqrt(width)) is exp2(x * factor): a multiply-add and one instruction. A lane adds up its own weights
  of a row; the four sums meet once, at the end.
- Tiles of 64 keys and values are copied asynchronously into two slots in turns: the next pair is under way
  while this one is multiplied. The one barrier a step says that this pair is here for all warps, and that all
  are done with the other slot.
- Causal, a block stops at its diagonal and masks that tile alone. Blocks with the most keys start first.

Counted: a block reads its queries, and the keys and values that it sees, once, without bank conflicts. A step
takes 64 multiplications of 16 x 8 x 16 and 36 loads of fragments for each warp, if the width is 64.

Source: Dao, FlashAttention-2, 2023, sections 3.1 and 3.3.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, int32, uint32
from numba.cuda import libdevice

from ..instructions.copies import cp_async_commit, cp_async_wait
from ..runtime.kernel import Kernel
from ..runtime.matrix import Matrix
from ..tiling.packing import aligned_rows, copy_back
from ..tiling.panels import inlined, unrolled
from .cuda_attention_rung import CudaAttentionRung
from .products import EVERYONE, LOG2_E, SIDE, THREADS, WORDS, in_chunks, parts_of, products


@functools.cache
def kernel(dtype: str, causal: bool, parts: int) -> Kernel:
    """Return the kernel for a width of at most 64 x parts. Launch heads x tiles of queries."""
    copy, along, hide, pack, across, store = products(dtype, parts)
    tile, own = parts * WORDS, parts * 32  # words; sums of a lane

    @inlined
    def soften(r, scores, sums, tops, totals, factor):  # type: ignore[no-untyped-def]
        """Make weights of a row's scores, and rescale what was summed with a smaller largest score."""
        top = tops[r]
        for e in range(16):
            top = max(top, scores[e // 2 * 4 + r * 2 + e % 2])
        top = max(top, cuda.shfl_xor_sync(EVERYONE, top, 1))
        top = max(top, cuda.shfl_xor_sync(EVERYONE, top, 2))
        shrink = libdevice.exp2f((tops[r] - top) * factor)
        tops[r] = top
        totals[r] *= shrink
        for e in range(parts * 16):
            sums[e // 2 * 4 + r * 2 + e % 2] *= shrink
        for e in range(16):
            at = e // 2 * 4 + r * 2 + e % 2
            scores[at] = libdevice.exp2f(scores[at] * factor - top * factor)
            totals[r] += scores[at]

    @inlined
    def finish(r, sums, tops, totals, factor, logs, at, left):  # type: ignore[no-untyped-def]
        """Divide a row by the sum of its weights, and store the sum's logarithm."""
        total = totals[r]
        total += cuda.shfl_xor_sync(EVERYONE, total, 1)
        total += cuda.shfl_xor_sync(EVERYONE, total, 2)
        for e in range(parts * 16):
            sums[e // 2 * 4 + r * 2 + e % 2] /= total
        if r * 8 < left:
            logs[at + r * 8] = (tops[r] * factor + libdevice.fast_log2f(total)) / float32(LOG2_E)

    soften_rows, finish_rows = unrolled(soften, 2), unrolled(finish, 2)

    def tensor_core_attention(q, k, v, out, logs, pitch, queries, keys, width):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(0, uint32, alignment=128)
        scores, sums = cuda.local.array(32, float32), cuda.local.array(own, float32)
        tops, totals = cuda.local.array(2, float32), cuda.local.array(2, float32)
        weights = cuda.local.array(16, uint32)
        thread, head = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane, warp = int32(thread % 32), int32(thread // 32)
        i0 = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * SIDE)
        i, last = int32(i0 + warp * 16 + lane // 4), int32((head + 1) * queries)
        end = int32(min(keys, i0 + SIDE) if causal else keys)
        factor = float32(LOG2_E) / math.sqrt(float32(width))
        for e in range(own):
            sums[e] = 0
        tops[0] = tops[1] = float32(-1e38)  # finite, so that a first score of -inf weighs 0
        totals[0] = totals[1] = 0
        copy(shared, int32(0), q, pitch, int32(last - queries + i0), last, width, thread)
        here, there, j0 = int32(tile), int32(3 * tile), int32(-SIDE)
        while j0 < end:
            cp_async_wait(0)
            cuda.syncthreads()
            if j0 + SIDE < end:  # the next pair
                key, last_key = int32(head * keys + j0 + SIDE), int32((head + 1) * keys)
                copy(shared, there, k, pitch, key, last_key, width, thread)
                copy(shared, there + tile, v, pitch, key, last_key, width, thread)
                cp_async_commit()
            if j0 >= 0:
                along(scores, shared, int32(0), here, warp, lane)
                if j0 + SIDE > (i0 if causal else keys):
                    first = int32(j0 + lane % 4 * 2)
                    hide(scores, keys - first, i - first if causal else SIDE, False)
                soften_rows(scores, sums, tops, totals, factor)
                pack(weights, scores)
                across(sums, weights, shared, here + tile, lane)
            here, there, j0 = there, here, int32(j0 + SIDE)
        row = int32(last - queries + i0 + warp * 16)
        left = int32(queries - i if lane % 4 == 0 else 0)
        finish_rows(sums, tops, totals, factor, logs, row + lane // 4, left)
        store(out, pitch, last, width, row, sums, shared, warp, lane)

    return Kernel(tensor_core_attention, threads=THREADS, architecture="sm_80")


def compute(q: Matrix, k: Matrix, v: Matrix, out: Matrix, logs: Matrix, heads: int, causal: int) -> None:
    """Enqueue out = softmax(q k^T / sqrt(width)) v, and logs."""
    queries, keys, width, parts = q.rows // heads, k.rows // heads, q.columns, parts_of(q.columns)
    result = aligned_rows(out)
    arrays = (*map(in_chunks, (q, k, v)), result.data, logs.data)
    sizes = (width + -width % 8, queries, keys, width)
    grid = (heads, -(-queries // SIDE))
    kernel(q.dtype, bool(causal), parts).launch(grid, *arrays, *sizes, shared=4 * 5 * parts * WORDS)
    copy_back(result, out)


RUNG = CudaAttentionRung.of_file(
    __name__,
    idea="Tensor cores for both products, between which weights stay in the registers where scores arose.",
    dtypes=("float16", "bfloat16"),
    compute=compute,
    architecture="sm_80",
    room={"tensor_core_attention": (184, 2, 5 * 64 * 128)},  # tiles: queries, and two pairs
)
