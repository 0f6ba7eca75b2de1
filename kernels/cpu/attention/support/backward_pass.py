"""The backward pass of attention, which computes the weights again instead of keeping them.

With p the weights, dv = p^T d_out. With dp = d_out v^T and ds = p (dp - mean), where mean is a query's sum of
out times d_out, dq = ds k and dk = ds^T q, both times 1 / sqrt(width). The logarithm of a query's sum makes
p = exp(score - log) without another softmax.

All of it is computed transposed, keys x queries: then p^T and ds^T lie as the tile reads a first factor, the
softmax's shifts and means stand beside each other in a row, and dq^T = k^T ds^T takes ds^T as it lies.

Sources: Dao et al., FlashAttention, 2022, appendix B; Dao, FlashAttention-2, 2023, algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from ...support import register_tile
from ...support.packed_product import pack, pack_panels
from ...support.vector_moves import offset, pointer
from .forward_pass import COLUMNS, INFINITY, product
from .sizes import GAP, QUERIES, TALL
from .vector_softmax import LOG2_E, gradients

ROW = QUERIES + GAP  # from a row of scores to the next
HEIGHT = TALL * register_tile.ROWS  # keys that make their scores together
PITCH = HEIGHT + GAP  # of their transpose


@njit(boundscheck=False)
def attend(inputs: Any, outputs: Any, results: Any, space: Any, first: int, causal: int) -> None:
    """Fill dq, and add to dk and dv but for dk's factor, for some queries; the first has number `first`.

    inputs are (q, k, v), outputs (out, d_out, logs), results (dq, dk, dv), of which dk and dv have whole
    panels' columns. q, out, d_out, logs and dq are those of the queries, the others those of the head.
    """
    (q, k, v), (out, d_out, logs), (dq, dk, dv) = inputs, outputs, results
    queries, width = q.shape
    wide = dk.shape[1]
    root = np.float32(math.sqrt(width))
    q_down = pointer(space, 0, 0)  # transposed, for scores
    d_down = offset(q_down, QUERIES * width)
    q_across = offset(d_down, QUERIES * width)
    d_across = offset(q_across, QUERIES * wide)
    scores = offset(d_across, QUERIES * wide)  # then weights
    slopes = offset(scores, HEIGHT * ROW)  # dp, then ds
    k_down = offset(slopes, HEIGHT * ROW)
    sums = offset(k_down, width * PITCH)  # of dq, transposed
    shifts = offset(sums, width * ROW)
    means = offset(shifts, ROW)
    for i0 in range(0, queries, QUERIES):
        count = min(QUERIES, queries - i0)
        asked, slope = q[i0 : i0 + count], d_out[i0 : i0 + count]
        pack_panels(asked.T, q_down)
        pack_panels(slope.T, d_down)
        pack_panels(asked, q_across)
        pack_panels(slope, d_across)
        for i in range(ROW):
            shifts[i], means[i] = INFINITY, 0
        for i in range(count):
            shifts[i] = logs[i0 + i, 0] * np.float32(LOG2_E)
            for c in range(width):
                means[i] += out[i0 + i, c] * slope[i, c]
        keys = min(k.shape[0], first + i0 + count) if causal else k.shape[0]
        for j0 in range(0, keys, HEIGHT):
            seen = min(HEIGHT, keys - j0)
            shape = seen, count, width
            product(shape, pointer(k, j0, 0), width, q_down, width, COLUMNS, scores, ROW, 0)
            product(shape, pointer(v, j0, 0), width, d_down, width, COLUMNS, slopes, ROW, 0)
            for r in range(seen):
                row = offset(scores, r * ROW)
                for i in range(min(count, j0 + r - first - i0) if causal else 0):
                    row[i] = -INFINITY
                gradients(row, offset(slopes, r * ROW), count, np.float32(LOG2_E) / root, shifts, means)
            shape = seen, width, count
            product(shape, scores, ROW, d_across, count, COLUMNS, pointer(dv, j0, 0), wide, 1)
            product(shape, slopes, ROW, q_across, count, COLUMNS, pointer(dk, j0, 0), wide, 1)
            pack(k[j0 : j0 + seen].T, k_down, PITCH)
            product((width, count, seen), k_down, PITCH, slopes, 1, ROW, sums, ROW, int(j0 > 0))
        for i in range(count):
            for c in range(width):
                dq[i0 + i, c] = sums[c * ROW + i] / root
