"""Rung 3: the loops of rung 1, compiled.

The idea: give the three loops to Numba. It infers that every value is a machine number, and LLVM turns the
loops into machine code. Nothing is boxed, looked up or freed any more: a multiply-add is two loads, a
multiplication and an addition.

Measured: rung 2 takes 7 times as long (250 x 250 x 250, float32: 79 ms and 11 ms, 2.9 GFLOP/s). It is still
one scalar at a time. SIMD would add the products in another order, which the compiler may not do, and so
each addition waits for the one before it.
"""

from __future__ import annotations

from ..rung import Array, Rung
from .support.compiling import compiled


@compiled("AAA")
def compute(a: Array, b: Array, out: Array) -> None:
    """Fill out (m, n) with a (m, k) times b (k, n)."""
    m, k = a.shape
    n = b.shape[1]
    for i in range(m):
        for j in range(n):
            total = out.dtype.type(0)
            for p in range(k):
                total += a[i, p] * b[p, j]
            out[i, j] = total


RUNG = Rung.of_file(
    __name__,
    idea="Numba compiles the loops of rung 1, so that no interpreter stands between two multiply-adds.",
    dtypes=("float32", "float64"),
    compute=compute,
)
