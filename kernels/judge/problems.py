"""Ten problems for a reader's own kernels: a specification, random cases of any size, and what par costs.

A problem is a function. Its docstring is the specification, its parameters after `draw` are the sizes, and it
returns a case: the arrays with random numbers, and what has to come out, computed in float64. Par is what the
solution in examples/judge/pars.py costs at the sizes that are scored.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..rung import Array

EPS = 2.0**-23  # the distance of float32 numbers around 1
WIDTH = 64  # of a head of attention
BINS = 256
Draw = np.random.Generator


@dataclass(frozen=True)
class Case:
    """The arrays of one run. `allowed` is how far each element of the result may be from `expected`."""

    inputs: dict[str, Array]
    out: Array  # NaN, or 0 where the specification says so
    expected: NDArray[Any]
    allowed: NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """One problem."""

    make: Callable[..., Case]
    scored: tuple[int, ...]  # the sizes that are scored
    most: tuple[int, ...]  # the largest sizes of other cases
    step: tuple[int, ...]  # each size is a multiple of it
    par: int  # what a good solution costs at the scored sizes

    @property
    def name(self) -> str:
        """The name, which the reader's function has too."""
        return self.make.__name__

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of the sizes."""
        return tuple(inspect.signature(self.make).parameters)[1:]

    @property
    def specification(self) -> str:
        """The specification that a reader sees: the kernel's task, and the sizes that are scored."""
        text = inspect.cleandoc(self.make.__doc__ or "")
        scored = ", ".join(f"{name} = {n}" for name, n in zip(self.sizes, self.scored, strict=True))
        return f"{text}\n\nScored at {scored}; right for all other sizes, too. Par costs {self.par:,}."

    def some_sizes(self, draw: Draw) -> list[tuple[int, ...]]:
        """Return sizes to try: the smallest, whole tiles, and ragged ones."""
        kinds: list[Callable[[int], int]] = [
            lambda most: 1,
            lambda most: int(draw.integers(1, min(most, 40) + 1)),
            lambda most: min(32 * int(draw.integers(1, max(most // 32, 1) + 1)), most),
            lambda most: min(int(draw.integers(most * 7 // 8, most + 1)) | 1, most),
        ]
        same = [[kind] * len(self.most) for kind in kinds]
        mixed = [[kinds[i] for i in draw.integers(1, 4, len(self.most))] for _ in range(2)]
        return [
            tuple(
                -(-kind(most) // step) * step
                for kind, most, step in zip(row, self.most, self.step, strict=True)
            )
            for row in [*same, *mixed]
        ]


PROBLEMS: dict[str, Problem] = {}


def problem(
    *scored: int, most: tuple[int, ...], par: int, step: tuple[int, ...] = ()
) -> Callable[[Callable[..., Case]], Problem]:
    """Make a problem of the function below, and add it to PROBLEMS."""

    def add_it(make: Callable[..., Case]) -> Problem:
        made = Problem(make, scored, most, step or (1,) * len(scored), par)
        return PROBLEMS.setdefault(made.name, made)

    return add_it


def _normal(draw: Draw, *shape: int) -> Array:
    return draw.standard_normal(shape, np.float32)


def _each(draw: Draw, n: int, *kinds: float) -> Array:
    """Return (n, 1) of these, each as often as the others: a kernel may cost more for some of them."""
    return draw.permutation(np.resize(np.array(kinds, np.float32), n))[:, None]


def _unwritten(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def _long(x: Array) -> NDArray[np.float64]:
    return x.astype(np.float64)


@problem(65536, most=(3000,), par=117289)
def add(draw: Draw, n: int) -> Case:
    """add(x, y, out): out = x + y.

    x, y, out (n): float32.
    """
    x, y = _normal(draw, n), _normal(draw, n)
    expected = _long(x) + _long(y)
    return Case({"x": x, "y": y}, _unwritten(n), expected, EPS * abs(expected))


@problem(256, 256, most=(150, 150), par=242496)
def transpose(draw: Draw, m: int, n: int) -> Case:
    """transpose(a, out): the rows of a become the columns of out.

    a (m, n), out (n, m): float32, in C order.
    """
    a = _normal(draw, m, n)
    return Case({"a": a}, _unwritten(n, m), a.T, np.zeros((n, m)))


@problem(65536, most=(3000,), par=75771)
def reduction(draw: Draw, n: int) -> Case:
    """reduction(x, out): out[0] = the sum of x.

    x (n), out (1): float32. out arrives as 0, so blocks can add their sums to it.
    """
    x = _normal(draw, n) + np.float32(draw.uniform(1, 2))  # so that no sum is within rounding of the 0 in out
    x *= 10 ** np.float32(draw.uniform(-2, 2))
    return _sums(
        {"x": x}, np.zeros(1, np.float32), _long(x).sum(keepdims=True), abs(_long(x)).sum(keepdims=True), n
    )


def _sums(inputs: dict[str, Array], out: Array, expected: Any, magnitude: Any, terms: int) -> Case:
    """Return a case of sums of `terms` numbers in float32, in any order; `magnitude` sums absolute values.

    Errors of single additions are random, so they grow as the square root of their number.
    """
    return Case(inputs, out, expected, EPS * (4 + math.sqrt(terms)) * magnitude)


@problem(64, 1024, most=(6, 700), par=440340)
def scan(draw: Draw, m: int, n: int) -> Case:
    """scan(x, out): out[i, j] = x[i, 0] + ... + x[i, j].

    x, out (m, n): float32, in C order.
    """
    x = _normal(draw, m, n)
    return _sums({"x": x}, _unwritten(m, n), _long(x).cumsum(1), abs(_long(x)).cumsum(1), n)


@problem(65536, most=(3000,), par=107735)
def histogram(draw: Draw, n: int) -> Case:
    """histogram(x, out): out[b] = how many elements of x are b.

    x (n): int32, from 0 to 255. out (256): int32, which arrives as 0.
    """
    x = draw.integers(0, BINS, n, np.int32)
    if n != histogram.scored[0]:  # where data decide what a kernel costs, they are alike
        x[draw.random(n) < draw.random()] = draw.integers(BINS)
    return Case({"x": x}, np.zeros(BINS, np.int32), np.bincount(x, minlength=BINS), np.zeros(BINS))


@problem(64, 1024, most=(6, 700), par=286301)
def softmax(draw: Draw, m: int, n: int) -> Case:
    """softmax(x, out): out[i, j] = exp(x[i, j]) / the sum of exp(x[i]), for numbers of any size.

    x, out (m, n): float32, in C order. exp(89) is too large for float32: subtract the row's maximum.
    """
    x = (_normal(draw, m, n) * _each(draw, m, 10, 1) + _each(draw, m, 500, -500, 0)).astype(np.float32)
    below = _long(x) - x.max(1, keepdims=True)
    weights = np.exp(below)
    expected = weights / weights.sum(1, keepdims=True)
    return Case({"x": x}, _unwritten(m, n), expected, 2 * EPS * (16 - 2 * below) * expected + 1e-37)


@problem(128, 128, 128, most=(150, 150, 70), par=187779)
def matmul(draw: Draw, m: int, n: int, k: int) -> Case:
    """matmul(a, b, out): out = a b.

    a (m, k), b (k, n), out (m, n): float32, in C order. Tensor cores round float32 to fewer bits: too few.
    """
    a, b = _normal(draw, m, k), _normal(draw, k, n)
    product, magnitude = _long(a) @ _long(b), abs(_long(a)) @ abs(_long(b))
    return _sums({"a": a, "b": b}, _unwritten(m, n), product, magnitude, k)


@problem(128, 128, 128, most=(150, 150, 304), step=(1, 1, 16), par=46835)
def matmul_f16(draw: Draw, m: int, n: int, k: int) -> Case:
    """matmul_f16(a, b, out): out = a times b transposed, with sums in float32, as tensor cores add.

    a (m, k), b (n, k): float16, in C order; k is a multiple of 16. out (m, n): float32.
    """
    a, b = _normal(draw, m, k).astype(np.float16), _normal(draw, n, k).astype(np.float16)
    product, magnitude = _long(a) @ _long(b).T, abs(_long(a)) @ abs(_long(b)).T
    return _sums({"a": a, "b": b}, _unwritten(m, n), product, magnitude, k)


@problem(4, 128, most=(2, 100), par=1576540)
def attention(draw: Draw, heads: int, positions: int) -> Case:
    """attention(q, k, v, out): in each head, out = softmax(q k^T / 8) v, row by row.

    q, k, v, out (heads, positions, 64): float32, in C order.
    """
    return _attention(draw, (heads, positions, WIDTH), "float32", causal=False)


@problem(4, 128, most=(2, 100), par=115411)
def attention_causal(draw: Draw, heads: int, positions: int) -> Case:
    """attention_causal(q, k, v, out): as attention, but position i sees the keys 0 to i alone.

    q, k, v, out (heads, positions, 64): float16, in C order. Sum in float32; the weights, the exponentials
    divided or not, may be rounded to float16 for tensor cores.
    """
    return _attention(draw, (heads, positions, WIDTH), "float16", causal=True)


def _attention(draw: Draw, shape: tuple[int, ...], dtype: str, causal: bool) -> Case:
    q, k, v = (_normal(draw, *shape) for _ in range(3))
    q *= _each(draw, shape[0], 10, 1)[:, None]
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    scores = _long(q) @ _long(k).swapaxes(1, 2) / math.sqrt(WIDTH)
    magnitude = (abs(_long(q)) @ abs(_long(k)).swapaxes(1, 2)).max(2, keepdims=True) / math.sqrt(WIDTH)
    if causal:
        scores[:, ~np.tri(shape[1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    allowed = EPS * (16 + 4 * magnitude) * (weights @ abs(_long(v)))
    if dtype == "float16":  # weights and the result are rounded to it, small weights to multiples of 2**-24
        allowed += 2.0**-10 * (weights @ abs(_long(v))) + 2.0**-24 * abs(_long(v)).sum(1, keepdims=True)
    return Case({"q": q, "k": k, "v": v}, np.full(shape, np.nan, dtype), weights @ _long(v), allowed)
