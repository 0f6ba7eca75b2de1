"""Attention in CUDA, rung 1: by the definition, in three kernels.

The idea: one kernel for each step. A thread computes one score, a dot product of a query and a key. A thread
turns one row of scores into weights, in three passes: the largest, the sum of exp(score - largest), the
division. A thread computes one element of the result, a dot product of weights and a column of v. Between the
kernels the scores of all heads lie in global memory: heads x queries x keys numbers, 4 GiB at 16,384
positions and 4 heads.

Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.1.
"""

from __future__ import annotations

import math

from numba import cuda, float32, int32

from ..runtime.kernel import Kernel
from ..runtime.matrix import Matrix
from ..tiling.packing import scratch
from .cuda_attention_rung import CudaAttentionRung

THREADS = 256


def scores(q, k, s, queries, keys, causal):  # type: ignore[no-untyped-def]
    """Compute the score of one query and one key in a thread: s is (heads x queries, keys)."""
    e = cuda.blockIdx.x * THREADS + cuda.threadIdx.x  # 64 bits: there may be 2^31 scores
    row, j = int32(e // keys), int32(e % keys)
    if row < s.shape[0]:
        head, i = int32(row // queries), int32(row % queries)
        total = float32(0)
        for c in range(q.shape[1]):
            total += q[row, c] * k[head * keys + j, c]
        s[row, j] = float32(-math.inf) if causal and j > i else total / math.sqrt(float32(q.shape[1]))


def softmax(s, logs):  # type: ignore[no-untyped-def]
    """Replace one row of scores by its weights in a thread."""
    row = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if row < s.shape[0]:
        top, total = float32(-math.inf), float32(0)
        for j in range(s.shape[1]):
            top = max(top, s[row, j])
        for j in range(s.shape[1]):
            weight = math.exp(s[row, j] - top)
            s[row, j] = weight
            total += weight
        for j in range(s.shape[1]):
            s[row, j] /= total
        logs[row] = top + math.log(total)


def values(s, v, out, queries, keys):  # type: ignore[no-untyped-def]
    """Compute one element of the result in a thread."""
    e = cuda.blockIdx.x * THREADS + cuda.threadIdx.x  # 64 bits, too
    row, c = int32(e // out.shape[1]), int32(e % out.shape[1])
    if row < out.shape[0]:
        head = int32(row // queries)
        total = float32(0)
        for j in range(keys):
            total += s[row, j] * v[head * keys + j, c]
        out[row, c] = total


SCORES = Kernel(scores, threads=THREADS)
SOFTMAX = Kernel(softmax, threads=THREADS)
VALUES = Kernel(values, threads=THREADS)


def compute(q: Matrix, k: Matrix, v: Matrix, out: Matrix, logs: Matrix, heads: int, causal: int) -> None:
    """Enqueue out = softmax(q k^T / sqrt(width)) v, and logs."""
    queries, keys = q.rows // heads, k.rows // heads
    s = scratch(q.rows, keys, "float32", 1).view2d()

    def blocks(threads: int) -> tuple[int]:
        return (-(-threads // THREADS),)

    SCORES.launch(blocks(q.rows * keys), q.view2d(), k.view2d(), s, queries, keys, causal)
    SOFTMAX.launch(blocks(q.rows), s, logs.data)
    VALUES.launch(blocks(q.rows * q.columns), s, v.view2d(), out.view2d(), queries, keys)


RUNG = CudaAttentionRung.of_file(
    __name__,
    idea="The definition: a kernel for the scores, one for their softmax, one for the product with v.",
    dtypes=("float32",),
    compute=compute,
    room=dict.fromkeys(("scores", "softmax", "values"), (64, 4, 0)),
)
