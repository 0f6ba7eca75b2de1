"""Rung 1: the definition of the product, as three Python loops.

out[i, j] is the sum over p of a[i, p] * b[p, j], one scalar at a time. This is the start of the ladder, and
as slow as it gets: for each multiply-add the interpreter fetches two elements, boxes them as objects, looks
up what `*` and `+` mean for them, and frees them again.

Measured: 250 x 250 x 250 in float32 takes 3.3 s, 0.009 GFLOP/s. (All rungs: one core of an AMD EPYC, Zen 4,
NumPy 2; neighbouring rungs timed in turns, A B A B; medians.)
"""

from __future__ import annotations

import numpy as np

from ..rung import Array, Rung


def compute(a: Array, b: Array, out: Array) -> None:
    """Fill out (m, n) with a (m, k) times b (k, n)."""
    m, k = a.shape
    n = b.shape[1]
    with np.errstate(all="ignore"):  # inf - inf and inf * 0 are results, as in BLAS
        for i in range(m):
            for j in range(n):
                total = out.dtype.type(0)  # a Python float would sum float32 in double precision
                for p in range(k):
                    total += a[i, p] * b[p, j]
                out[i, j] = total


RUNG = Rung.of_file(
    __name__,
    idea="Three Python loops, one scalar at a time: the definition of the product.",
    dtypes=("float32", "float64"),
    compute=compute,
)
