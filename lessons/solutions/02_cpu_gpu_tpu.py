"""Solutions of lesson 2.

The array is Kung and Leiserson's, "Systolic arrays (for VLSI)", 1978, with sums that stay in their places.
"""

from __future__ import annotations

import numpy as np


def vector_cost(m, n, k, lanes):
    """Instructions and reads: an element of a for each instruction, one of b for each multiply-add."""
    instructions = m * k * -(-n // lanes)  # rounded up: the last piece of a row may be short
    return instructions, instructions + m * n * k


def skew(x):
    """What enters each row of the grid, tick by tick (m, m + k - 1): row i is i ticks late."""
    m, k = x.shape
    entering = np.zeros((m, m + k - 1), x.dtype)
    for i in range(m):
        entering[i, i : i + k] = x[i]
    return entering


def systolic_step(a, b, sums, left, top):
    """One tick: a moves right, b moves down, and each PE multiplies what it now holds."""
    a = np.column_stack([left, a[:, :-1]])
    b = np.vstack([top, b[:-1]])
    sums = sums + a * b
    return a, b, sums


def systolic_matmul(x, y, step):
    """x times y, tick by tick: both enter skewed, and then zeros until the last PE has had its k pairs."""
    (m, k), n = x.shape, y.shape[1]
    left = np.pad(skew(x), ((0, 0), (0, n - 1)))
    top = np.pad(skew(y.T).T, ((0, m - 1), (0, 0)))
    a, b, sums = (np.zeros((m, n), x.dtype) for _ in range(3))
    for t in range(m + n + k - 2):
        a, b, sums = step(a, b, sums, left[:, t], top[t])
    return sums


def systolic_cost(m, n, k):
    """Ticks, reads and utilisation: PE (m - 1, n - 1) begins m + n - 2 ticks late, and works for k."""
    ticks = m + n + k - 2
    reads = m * k + k * n
    return ticks, reads, m * n * k / (m * n * ticks)
