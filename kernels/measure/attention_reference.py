"""Attention's formulas in float64, to which tests and benchmarks compare every rung."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..attention_rung import AttentionRung
from ..rung import Array, dtype_name
from .product_checks import numpy_dtype

# Relative to the largest of each array. Halves: four roundings, of the weights, of sums, of the result.
ERROR = {"float32": 1e-5, "float16": 4 * 2**-11, "bfloat16": 4 * 2**-8}
Size = tuple[tuple[int, ...], int, int, int]  # what stands before, queries, keys, width


def drawn(size: Size, rng: np.random.Generator, dtype: str = "float32") -> list[Array]:
    """Return random q, k, v, and a gradient of the result."""
    before, queries, keys, width = size
    shapes = [(*before, count, width) for count in (queries, keys, keys, queries)]
    return [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes]


def formula(q: Array, k: Array, v: Array, d_out: Array, causal: bool) -> tuple[Array, ...]:
    """Return out, logs, dq, dk and dv in float64."""
    q, k, v, d_out = (x.astype("float64") for x in (q, k, v, d_out))
    root = np.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(-1, -2) / root
    if causal:
        scores[..., np.tri(*scores.shape[-2:]) == 0] = -np.inf
    tops = scores.max(-1, keepdims=True)
    sums = np.exp(scores - tops).sum(-1, keepdims=True)
    p = np.exp(scores - tops) / sums
    out = p @ v
    ds = p * (d_out @ v.swapaxes(-1, -2) - (out * d_out).sum(-1, keepdims=True)) / root
    return out, (tops + np.log(sums))[..., 0], ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_out


def assert_near(
    found: Iterable[Any], expected: Iterable[Array], dtype: str = "float32", scale: float = 0.1
) -> float:
    """Raise AssertionError unless arrays or tensors are these up to rounding; return the largest error.

    Where numbers near 1 cancel nearly to nothing, the error is one of numbers of size `scale`.
    """
    largest = 0.0
    for x, exact in zip(found, expected, strict=True):
        if x.shape != exact.shape:
            raise AssertionError(f"a result has shape {tuple(x.shape)}, not {exact.shape}")
        size = max(abs(exact).max(), scale)
        np.testing.assert_allclose(_wide(x) / size, exact / size, rtol=0, atol=ERROR[dtype])
        largest = max(largest, abs(_wide(x) - exact).max() / size)
    return largest


def check(
    step: AttentionRung,
    size: Size,
    causal: bool,
    rng: np.random.Generator,
    dtype: str = "float32",
    to: Callable[[Array], Any] = np.asarray,
) -> float:
    """Raise AssertionError unless forward and, where the rung has it, backward are the formulas.

    `to` makes the operands, for example tensors on a GPU. Returns the largest error.
    """
    q, k, v, d_out = map(to, drawn(size, rng, dtype))
    exact = formula(_wide(q), _wide(k), _wide(v), _wide(d_out), causal)
    found = step.forward(q, k, v, causal=causal)
    kinds = [dtype_name(x.dtype) for x in found]
    # A logarithm's absolute error is the relative error of the weights, however small it is.
    worst = max(assert_near(found[:1], exact[:1], dtype), assert_near(found[1:], exact[1:2], dtype, scale=1))
    if step.gradients:
        gradients = step.backward(q, k, v, *found, d_out, causal=causal)
        kinds += [dtype_name(x.dtype) for x in gradients]
        worst = max(worst, assert_near(gradients, exact[2:], dtype))
    if kinds != [dtype, "float32", dtype, dtype, dtype][: len(kinds)]:
        raise AssertionError(f"{step.name} returned {kinds} for operands of {dtype}")
    return worst


def run(step: AttentionRung, size: Size, causal: bool, dtype: str) -> None:
    """Run a rung forward and, where it has it, backward, for what is counted meanwhile."""
    q, k, v, d_out = drawn(size, np.random.default_rng(0), dtype)
    out, logs = step.forward(q, k, v, causal=causal)
    if step.gradients:
        step.backward(q, k, v, out, logs, d_out, causal=causal)


def flops(size: Size, causal: bool, backward: bool) -> int:
    """Return the floating-point operations of two products, or of backward's five; half of them if causal."""
    before, queries, keys, width = size
    return (5 if backward else 2) * 2 * math.prod(before) * queries * keys * width // (2 if causal else 1)


def least_bytes(step: AttentionRung, size: Size, causal: bool, dtype: str, tile: int = 64) -> int:
    """Return the fewest bytes that `run` moves with tiles of so many positions.

    A tile of queries reads itself, the keys that it sees, and their values, and writes its result and logs.
    Backward, it reads both and the result's gradient, too, and writes its own; and a tile of keys reads
    itself, its values, the queries that see it and their results' gradients, and writes two gradients.
    """
    before, queries, keys, width = size
    seen = sum(min(keys, i + tile) if causal else keys for i in range(0, queries, tile))
    seeing = sum(queries - j if causal else queries for j in range(0, keys, tile))
    rows, logs = 2 * queries + 2 * seen, queries
    if step.gradients:
        rows, logs = rows + 4 * queries + 2 * seen + 4 * keys + 2 * seeing, 2 * logs
    return math.prod(before) * (rows * width * numpy_dtype(dtype).itemsize + 4 * logs)


def _wide(x: Any) -> Array:
    """Return an array or a tensor in float64, in main memory."""
    return x.astype("float64") if isinstance(x, np.ndarray) else x.detach().double().cpu().numpy()
