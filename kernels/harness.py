"""What every test and benchmark of a product needs: inputs, a reference, an error bound, work and timing.

The bound is the one that holds for any order of summation, fused multiply-adds or not: Higham, Accuracy and
Stability of Numerical Algorithms, 2nd edition, equation (3.13): |computed - exact| <= gamma_k |a||b|, element
by element, with gamma_k = k u / (1 - k u) and u half the spacing of the dtype's numbers at 1. So no correct
rung fails it by bad luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import DTypeLike

from .rung import Array, Rung, empty


def shapes(rng: np.random.Generator, count: int, largest: int) -> list[tuple[int, int, int]]:
    """Return `count` triples (m, n, k), each size drawn from 0 to `largest`: ragged, and 0 and 1 among them.

    The first four don't depend on chance: a 0 in each place, then all 1.
    """
    edges = [(0, largest, 2), (largest, 0, 2), (2, largest, 0), (1, 1, 1)]
    drawn = rng.integers(0, largest, size=(max(0, count - len(edges)), 3), endpoint=True)
    return [*edges, *((int(m), int(n), int(k)) for m, n, k in drawn)][:count]


def inputs(m: int, n: int, k: int, dtype: DTypeLike, seed: int) -> tuple[Array, Array]:
    """Return a (m, k) and b (k, n), random, with magnitudes in [0.5, 1.5) and random signs.

    No element is near 0: a product that a kernel leaves out, or counts twice, changes the result by 0.25 at
    least. With gamma_k |a||b| about k * k * u, that is past the bound for k up to about 2000 in float32.
    """
    rng = np.random.default_rng(seed)

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


def assert_product(c: Array, a: Array, b: Array, message: str = "") -> None:
    """Raise AssertionError unless c (m, n) is a (m, k) times b (k, n), but for rounding in c's dtype.

    A NaN or an infinity in c never passes; a and b have to be finite.
    """
    k = a.shape[1]
    expected = reference(a, b)
    if c.shape != expected.shape:
        raise AssertionError(f"{message}: the result has shape {c.shape}, not {expected.shape}")
    # Divided by |a||b|, the error has one bound for all elements. Where |a||b| is 0 the sum is exactly 0.
    scale = reference(np.abs(a), np.abs(b))
    scale[scale == 0] = 1
    # The reference is rounded too, which counts where c is float64 itself: hence the sum of both bounds.
    tolerance = _gamma(k, c.dtype) + _gamma(k, np.float64)
    np.testing.assert_allclose(
        c / scale,
        expected / scale,
        rtol=0,
        atol=tolerance,
        equal_nan=False,
        err_msg=f"{message} (in units of |a||b|)",
    )


def check(rung: Rung, m: int, n: int, k: int, dtype: DTypeLike, rng: np.random.Generator) -> None:
    """Raise AssertionError unless `rung` multiplies fresh random (m, k) by (k, n) rightly.

    `out` holds NaN at first, so that an element never written, or one that is added to, fails; a and b must
    come through unchanged. The message has the seed that makes `inputs` draw the same numbers again.
    """
    seed = int(rng.integers(2**63))
    message = f"rung {rung.name}, m={m}, n={n}, k={k}, {np.dtype(dtype).name}, seed={seed}"
    a, b = inputs(m, n, k, dtype, seed)
    out = np.full((m, n), np.nan, dtype)
    c = rung.matmul(a, b, out=out)
    if c is not out:
        raise AssertionError(f"{message}: matmul returned another array than out")
    for x, before in zip((a, b), inputs(m, n, k, dtype, seed), strict=True):
        np.testing.assert_array_equal(x, before, err_msg=f"{message}: an input was changed")
    assert_product(c, a, b, message)


def flops(m: int, n: int, k: int) -> int:
    """Return the floating-point operations: a multiplication and an addition for each i, j and p."""
    return 2 * m * n * k


def bytes(m: int, n: int, k: int, dtype: DTypeLike) -> int:
    """Return the fewest bytes that the product moves: a and b read once, c written once."""
    return (m * k + k * n + m * n) * np.dtype(dtype).itemsize


def time_in_turns(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Call the functions in turn, A B A B, `rounds` times each, and return the seconds of each call by name.

    Machines drift (clocks, temperature, neighbours): in turns, a drift meets all alike, so that the ratio of
    two medians stands where two separate timings would mislead. Each function is called once before, untimed,
    for what happens only once: compiling, page faults, cold caches. A function that starts work elsewhere, on
    a GPU, has to wait for its end itself.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: time at least one")
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _gamma(k: int, dtype: DTypeLike) -> float:
    unit_roundoff = float(np.finfo(np.dtype(dtype)).eps) / 2
    return k * unit_roundoff / (1 - k * unit_roundoff)
