"""Attention as the tests of its rungs check it: beside the formulas in float64."""

import numpy as np

# Relative to the largest of each array. Halves: four roundings, of the weights, of sums, of the result.
ERROR = {"float32": 1e-5, "float16": 4 * 2**-11, "bfloat16": 4 * 2**-8}


def drawn(size, rng, dtype="float32"):
    """q, k, v and the gradient of the result, of size (what stands before, queries, keys, width)."""
    before, queries, keys, width = size
    shapes = [(*before, count, width) for count in (queries, keys, keys, queries)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def formula(q, k, v, d_out, causal):
    """out, logs, dq, dk, dv in float64."""
    q, k, v, d_out = (x.astype("float64") for x in (q, k, v, d_out))
    root = np.sqrt(q.shape[-1])
    scores = q @ k.swapaxes(-1, -2) / root
    if causal:
        scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
    tops = scores.max(-1, keepdims=True)
    sums = np.exp(scores - tops).sum(-1, keepdims=True)
    p = np.exp(scores - tops) / sums
    out = p @ v
    ds = p * (d_out @ v.swapaxes(-1, -2) - (out * d_out).sum(-1, keepdims=True)) / root
    return out, (tops + np.log(sums))[..., 0], ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_out


def assert_near(found, expected, dtype="float32", scale=0.1):  # numbers near 1 may cancel
    for x, exact in zip(found, expected, strict=True):
        assert x.shape == exact.shape
        error = ERROR[dtype] * max(abs(exact).max(), scale)
        np.testing.assert_allclose(x.astype("float64"), exact, rtol=0, atol=error)


def check(step, size, causal, rng, dtype="float32"):
    """Fail unless forward and, where the rung has it, backward are the formulas."""
    q, k, v, d_out = drawn(size, rng, dtype)
    expected = formula(q, k, v, d_out, causal)
    found = step.forward(q, k, v, causal=causal)
    assert [x.dtype for x in found] == [dtype, "float32"]
    assert_near(found[:1], expected[:1], dtype)
    # A logarithm's absolute error is the relative error of the weights, however small it is.
    assert_near(found[1:], expected[1:2], dtype, scale=1)
    if step.gradients:
        gradients = step.backward(q, k, v, *found, d_out, causal=causal)
        assert {x.dtype for x in gradients} == {np.dtype(dtype)}
        assert_near(gradients, expected[2:], dtype)
