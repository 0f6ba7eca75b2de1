"""Solutions of lesson 17.

The softmax in one pass is from Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
Blocks of keys, and the backward pass that computes the weights again, are from Dao et al. 2022,
"FlashAttention".
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, float32

WIDTH = 16
KEYS = 32
SCALE = 1 / math.sqrt(WIDTH)


def numbers_moved(T, D):
    """Numbers that the three kernels read from global memory, and write to it, for one head."""
    return 4 * T * D + 4 * T * T


def one_pass(scores):
    """The largest score, and the sum of exp(score - largest), from one pass over an iterator."""
    largest, total = -math.inf, 0.0
    for score in scores:
        if score > largest:
            total *= math.exp(largest - score)  # its terms were made with the old largest
            largest = score
        total += math.exp(score - largest)
    return largest, total


def merged(one, other):
    """The part of all the keys, from the parts of some and of the others."""
    largest = max(one[0], other[0])
    first, second = math.exp(one[0] - largest), math.exp(other[0] - largest)
    return largest, first * one[1] + second * other[1], first * one[2] + second * other[2]


def attention_in_blocks(q, k, v, block):
    """The result (T, D) of attention, and the logarithms (T,) of the sums, from blocks of keys."""
    T, D = q.shape
    largest = np.full((T, 1), -np.inf, np.float32)
    total = np.zeros((T, 1), np.float32)
    sums = np.zeros((T, D), np.float32)
    for first in range(0, len(k), block):
        scores = q @ k[first : first + block].T / math.sqrt(D)
        higher = np.maximum(largest, scores.max(axis=1, keepdims=True))
        weights, fade = np.exp(scores - higher), np.exp(largest - higher)
        total = fade * total + weights.sum(axis=1, keepdims=True)
        sums = fade * sums + weights @ v[first : first + block]
        largest = higher
    return sums / total, (largest + np.log(total))[:, 0]


@cuda.jit(device=True)
def fetch(tile, matrix, first):
    """The block's threads copy as many rows of the matrix as the tile has. The lesson gives it."""
    rows, columns = tile.shape
    for s in range(cuda.threadIdx.x, rows * columns, cuda.blockDim.x):
        j, c = s // columns, s % columns
        inside = first + j < matrix.shape[0]
        tile[j, c] = matrix[first + j, c] if inside else float32(0)


@cuda.jit
def flash_attention(q, k, v, out, logs, causal):
    """A thread for each query: its result in out, and the logarithm of its sum in logs."""
    tile_k = cuda.shared.array((KEYS, WIDTH), float32)
    tile_v = cuda.shared.array((KEYS, WIDTH), float32)
    query = cuda.local.array(WIDTH, float32)
    sums = cuda.local.array(WIDTH, float32)
    i = cuda.grid(1)
    largest, total = float32(-math.inf), float32(0)
    for c in range(WIDTH):
        query[c] = q[i, c] * float32(SCALE) if i < q.shape[0] else float32(0)
        sums[c] = float32(0)
    end = k.shape[0]
    if causal:  # the block's last query sees the most keys
        end = min(end, (cuda.blockIdx.x + 1) * cuda.blockDim.x)
    for first in range(0, end, KEYS):
        fetch(tile_k, k, first)
        fetch(tile_v, v, first)
        cuda.syncthreads()  # the tiles are whole
        seen = min(KEYS, (i + 1 if causal else k.shape[0]) - first)
        for j in range(seen):
            score = float32(0)
            for c in range(WIDTH):
                score += query[c] * tile_k[j, c]
            if score > largest:
                fade = math.exp(largest - score)
                total *= fade
                for c in range(WIDTH):
                    sums[c] *= fade
                largest = score
            weight = math.exp(score - largest)
            total += weight
            for c in range(WIDTH):
                sums[c] += weight * tile_v[j, c]
        cuda.syncthreads()  # all have read them
    if i < q.shape[0]:
        for c in range(WIDTH):
            out[i, c] = sums[c] / total
        logs[i] = largest + math.log(total)


def gradients_in_blocks(q, k, v, out, logs, d_out, block):
    """The gradients of q, k and v, (T, D) each, from that of the result."""
    root = math.sqrt(q.shape[1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    mean = (out * d_out).sum(axis=1, keepdims=True)
    for first in range(0, len(k), block):
        own = slice(first, first + block)
        weights = np.exp(q @ k[own].T / root - logs[:, None])
        dv[own] = weights.T @ d_out
        d_scores = weights * (d_out @ v[own].T - mean) / root
        dk[own] = d_scores.T @ q
        dq += d_scores @ k[own]
    return dq, dk, dv
