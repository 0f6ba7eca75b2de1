"""Attention, rung 1: by the definition, with a softmax in three passes.

The idea: softmax(q k^T / sqrt(width)) v, one step after the other. The scores of a head are an array of
queries x keys. A softmax goes over each of its rows three times: for the largest score, for the sum of
exp(score - largest), which cannot overflow, and to divide. Then the weights multiply the values.

At 16,384 positions the scores of one head are 1 GiB, and each is written once and read four times.

Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.1.
"""

from __future__ import annotations

import math

import numpy as np

from ...attention_rung import AttentionRung
from ...rung import Array
from ..support.compiling import compiled


@compiled("CCC")
def _scores(q: Array, k: Array, scores: Array, causal: int) -> None:
    width = q.shape[1]
    scale = np.float32(1 / math.sqrt(width))
    for i in range(q.shape[0]):
        for j in range(k.shape[0]):
            total = np.float32(0)
            for c in range(width):
                total += q[i, c] * k[j, c]
            scores[i, j] = -np.inf if causal and j > i else total * scale


@compiled("CC", error_model="numpy")
def softmax(x: Array, logs: Array) -> None:
    """Replace each row of x by its softmax, and fill logs (rows, 1) with the logarithms of the sums."""
    for i in range(x.shape[0]):
        row = x[i]
        top = row[0]
        for j in range(1, row.size):
            top = max(top, row[j])
        total = np.float32(0)
        for j in range(row.size):
            row[j] = math.exp(row[j] - top)
            total += row[j]
        for j in range(row.size):
            row[j] /= total
        logs[i, 0] = top + math.log(total)


@compiled("CCC")
def _values(weights: Array, v: Array, out: Array) -> None:
    out[...] = 0
    for i in range(weights.shape[0]):
        for j in range(v.shape[0]):
            for c in range(v.shape[1]):
                out[i, c] += weights[i, j] * v[j, c]


def compute(q: Array, k: Array, v: Array, out: Array, logs: Array, heads: int, causal: int) -> None:
    """Fill out with softmax(q k^T / sqrt(width)) v, and logs, for one head after the other."""
    for parts in zip(*(x.reshape(heads, -1, x.shape[1]) for x in (q, k, v, out, logs)), strict=True):
        queries, keys, values, result, sums = parts
        scores = np.empty((len(queries), len(keys)), q.dtype)
        _scores(queries, keys, scores, causal)
        softmax(scores, sums)
        _values(scores, values, result)


RUNG = AttentionRung.of_file(
    __name__,
    idea="The definition: all scores, a softmax in three passes over each row, weights times values.",
    dtypes=("float32",),
    compute=compute,
)
