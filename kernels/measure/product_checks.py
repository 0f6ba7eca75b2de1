"""Check a product by a reference and an error bound; count its work, and the fewest bytes that it moves.

The bound holds for any order of summation, with fused multiply-adds or without: Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, equation (3.13): |computed - exact| <= gamma_k |a||b|, element
by element, with gamma_k = k u / (1 - k u) and u half the spacing of the dtype's numbers at 1. So a correct
rung never fails by bad luck. `error_bound` widens the bound for tensor cores, by what is known of their sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..rung import Array, Rung, empty

# NumPy's dtype of the same size: TF32 only rounds float32 in registers, and bfloat16 needs ml_dtypes.
IN_MEMORY = {"tf32": "float32", "bfloat16": "float16"}


def shapes(rng: np.random.Generator, count: int, largest: int) -> list[tuple[int, int, int]]:
    """Return `count` triples (m, n, k): three with a 0, then all 1, then sizes drawn from 0 to `largest`."""
    edges = [(0, largest, 2), (largest, 0, 2), (2, largest, 0), (1, 1, 1)]
    drawn = rng.integers(0, largest, size=(max(0, count - len(edges)), 3), endpoint=True)
    return [*edges, *((int(m), int(n), int(k)) for m, n, k in drawn)][:count]


def inputs(m: int, n: int, k: int, dtype: DTypeLike, seed: int) -> tuple[Array, Array]:
    """Return a (m, k) and b (k, n), random, with magnitudes in [0.5, 1.5) and random signs.

    No element is near 0, so a product that a kernel omits, or counts twice, changes the result by at least
    0.25. With gamma_k |a||b| about k * k * u, that exceeds the bound for k up to about 2000 in float32, 1400
    on tensor cores, and 100 in TF32. Raises ImportError for "bfloat16" if ml_dtypes, which adds it to NumPy,
    is not installed.
    """
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(dtype)

    def draw(rows: int, columns: int) -> Array:
        magnitudes = rng.uniform(0.5, 1.5, (rows, columns))
        drawn = empty(rows, columns, dtype)
        drawn[...] = magnitudes * rng.choice((-1.0, 1.0), (rows, columns))
        return drawn

    return draw(m, k), draw(k, n)


def reference(a: Array, b: Array) -> Array:
    """Return a (m, k) times b (k, n), computed in float64 by NumPy's own product."""
    product: Array = np.matmul(a.astype(np.float64), b.astype(np.float64))
    return product


def assert_product(
    c: Array,
    a: Array,
    b: Array,
    message: str = "",
    *,
    sums: DTypeLike | None = None,
    tf32: bool = False,
    factors: float = 0.0,
) -> None:
    """Raise AssertionError unless c (m, n) is a (m, k) times b (k, n), up to rounding.

    `sums` is the dtype in which the products were added, by default c's own; `tf32` says that float32 factors
    were rounded to TF32, `factors` how large the relative error of another rounding is. A NaN or an infinity
    in c never passes; a and b have to be finite.
    """
    k = a.shape[1]
    expected = reference(a, b)
    if c.shape != expected.shape:
        raise AssertionError(f"{message}: the result has shape {c.shape}, not {expected.shape}")
    # Divided by |a||b|, the error has one bound for all elements. If |a||b| is 0 the sum is exactly 0.
    scale = reference(np.abs(a), np.abs(b))
    scale[scale == 0] = 1
    added = numpy_dtype(c.dtype if sums is None else sums)
    # Add the reference's own bound: it is rounded too, which counts if c is float64 itself.
    tolerance = error_bound(k, a.dtype, added, tf32, factors) + _gamma(k, unit_roundoff(np.float64))
    rounding = 0.0
    if added != c.dtype:  # each sum is rounded once more, or to a subnormal number
        rounding = unit_roundoff(c.dtype)
        tolerance = tolerance * (1 + rounding) + 2.0**-25 / float(scale.min(initial=np.inf))
    np.testing.assert_allclose(
        c.astype(np.float64) / scale,
        expected / scale,
        rtol=rounding,
        atol=tolerance,
        equal_nan=False,
        err_msg=f"{message} (in units of |a||b|)",
    )


def error_bound(k: int, dtype: DTypeLike, sums: DTypeLike, tf32: bool = False, factors: float = 0.0) -> float:
    """Return the largest error of a sum of k products of factors of `dtype`, over the sum of their sizes.

    If `sums` is the factors' own dtype that is gamma_k. Tensor cores, which take factors of 2 bytes and TF32,
    don't round as IEEE 754 says (Fasi, Higham, Mikaitis and Pranesh, PeerJ Computer Science 7:e330, 2021; the
    models in `tensor_core`, of 2025). They add N products (4 to 16) and the sum so far at once, cut each to
    23 + e bits below the largest, and the result to float32. With e >= 1, as from the A100 on, a term loses
    less than 2**-24 of the largest, and a result less than 2**-23. With k / N + 1 such steps, of N + 1 terms
    each, that is at most (k (1/2 + 1/(2 N) + 1/N) + 1) 2**-23, and so gamma_(k+1) with u = 2**-23. All
    partial sums are at most the sum of the sizes, times 1 + gamma.

    TF32 keeps 10 bits of each factor's fraction: cut off instead of rounded, it loses less than 2**-10.
    `factors` is what another format loses of a factor.
    """
    if not tf32 and not factors and numpy_dtype(sums) == numpy_dtype(dtype):
        return _gamma(k, unit_roundoff(sums))
    each = 2.0**-10 if tf32 else factors
    factors = 2 * each + each**2
    return factors + (1 + factors) * _gamma(k + 1, 2.0**-23)


def numpy_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the dtype, also for "bfloat16". Raises ImportError if that needs ml_dtypes."""
    if dtype == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401 (adds it to NumPy)
        except ImportError as error:
            raise ImportError(
                "NumPy has bfloat16 from ml_dtypes, which is not installed: pip install ml-dtypes"
            ) from error
    return np.dtype(dtype)


def unit_roundoff(dtype: DTypeLike) -> float:
    """Return half the spacing of the dtype's numbers at 1: the largest relative error of rounding."""
    kind = numpy_dtype(dtype)
    return 2.0**-8 if kind.name == "bfloat16" else float(np.finfo(kind).eps) / 2


def check(
    rung: Rung,
    m: int,
    n: int,
    k: int,
    dtype: DTypeLike,
    rng: np.random.Generator,
    out_dtype: DTypeLike | None = None,
) -> None:
    """Raise AssertionError unless `rung` multiplies fresh random (m, k) by (k, n) correctly.

    `out` is full of NaN at first, so an element that is never written, or only added to, fails; a and b must
    stay unchanged. The message has the seed with which `inputs` draws the same numbers again. `out_dtype` is
    the inputs' unless given.
    """
    seed = int(rng.integers(2**63))
    dtype = numpy_dtype(dtype)
    message = f"rung {rung.name}, m={m}, n={n}, k={k}, {dtype.name}, seed={seed}"
    a, b = inputs(m, n, k, dtype, seed)
    out = np.full((m, n), np.nan, dtype if out_dtype is None else numpy_dtype(out_dtype))
    c = rung.matmul(a, b, out=out)
    if c is not out:
        raise AssertionError(f"{message}: matmul returned another array than out")
    for x, before in zip((a, b), inputs(m, n, k, dtype, seed), strict=True):
        np.testing.assert_array_equal(x, before, err_msg=f"{message}: an input was changed")
    tf32 = rung.tf32 and dtype == np.float32
    assert_product(c, a, b, message, sums=rung.sums(dtype.name), tf32=tf32, factors=rung.factors)


def flops(m: int, n: int, k: int) -> int:
    """Return the floating-point operations: a multiplication and an addition for each i, j and p."""
    return 2 * m * n * k


def least_bytes(m: int, n: int, k: int, dtype: DTypeLike) -> int:
    """Return the fewest bytes that the product moves: a and b read once, c written once."""
    return (m * k + k * n + m * n) * np.dtype(IN_MEMORY.get(str(dtype), dtype)).itemsize


def _gamma(k: int, u: float) -> float:
    return k * u / (1 - k * u)
