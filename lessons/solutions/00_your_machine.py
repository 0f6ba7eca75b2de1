"""Solutions of lesson 0.

The roofline is from Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model
for multicore architectures".
"""

from __future__ import annotations

import numpy as np


def add_cost(n, itemsize):
    """FLOPs and bytes of y += x: an addition for each element; x and y are read, y is written."""
    return n, 3 * n * itemsize


def matmul_cost(m, k, n, itemsize):
    """FLOPs and bytes of an (m, k) matrix times a (k, n) matrix, with each element moved once."""
    flop = 2 * m * k * n
    moved = (m * k + k * n + m * n) * itemsize
    return flop, moved


def attainable(peak, bandwidth, intensity):
    """FLOP/s that a program can reach at most: np.minimum takes numbers and arrays."""
    return np.minimum(peak, bandwidth * intensity)


def predict(flop, moved, peak, bandwidth):
    """Seconds at the least, and what takes them; both times are asked for, so that neither divides by 0."""
    computing, moving = flop / peak, moved / bandwidth
    if moving > computing:
        return moving, "memory"
    return computing, "arithmetic"
