"""A rung of an attention ladder: softmax(q k^T / sqrt(width)) v, as a callable that says what it is.

Letters, here and in every rung: q is (..., queries, width), k and v are (..., keys, width); what stands
before is the same for all three, and counts the heads. Rungs get them as (heads x positions, width), one head
after the other. `logs` are the logarithms of the softmax's sums, one for each query: from them the backward
pass computes the weights again, without another softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .rung import Array, Step


@dataclass(frozen=True)
class AttentionRung(Step):
    """One step of a ladder of attention; a rung's file ends with `RUNG = AttentionRung(...)`.

    `compute(q, k, v, out, logs, heads, causal)` overwrites out and logs (heads x queries, 1). It is called
    with sizes >= 1, and arrays in C order that share no memory.
    """

    # gradients(q, k, v, out, logs, d_out, dq, dk, dv, heads, causal) overwrites dq, dk and dv.
    gradients: Callable[..., None] | None = None

    def attention(self, q: Array, k: Array, v: Array, *, causal: bool = False) -> Array:
        """Return the values that each query attends to, (..., queries, width).

        With `causal`, a query sees the keys up to its own position. Sizes may be anything, and so may
        strides. Without keys the result is zeros. Raises TypeError for anything but arrays of one dtype that
        this rung takes, ValueError for shapes that do not fit.
        """
        return self.forward(q, k, v, causal=causal)[0]

    def forward(self, q: Array, k: Array, v: Array, *, causal: bool = False) -> tuple[Array, Array]:
        """Return `attention`, and the logarithms of its softmax's sums (..., queries) for `backward`."""
        self._check(causal, q=q, k=k, v=v)
        out, logs = np.zeros(q.shape, q.dtype), np.full(q.shape[:-1], -np.inf, q.dtype)
        if q.size and k.size:
            heads = math.prod(q.shape[:-2])
            self.compute(*map(_rows, (q, k, v)), _rows(out), logs.reshape(-1, 1), heads, int(causal))
        return out, logs

    def backward(
        self, q: Array, k: Array, v: Array, out: Array, logs: Array, d_out: Array, *, causal: bool = False
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v for those of `out`, given what `forward` returned.

        Raises RuntimeError if this rung has no backward pass; otherwise as `attention`.
        """
        if self.gradients is None:
            raise RuntimeError(f"rung {self.name} has no backward pass: take s7_backward")
        self._check(causal, q=q, k=k, v=v, out=out, d_out=d_out, logs=logs)
        dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (q, k, v))
        if q.size and k.size:
            given = map(_rows, (q, k, v, out, logs[..., None], d_out))
            heads = math.prod(q.shape[:-2])
            self.gradients(*given, *map(_rows, (dq, dk, dv)), heads, int(causal))
        return dq, dk, dv

    def _check(self, causal: bool, **arrays: Any) -> None:
        q, k = arrays["q"], arrays["k"]
        for name, x in arrays.items():
            if not isinstance(x, np.ndarray):
                raise TypeError(
                    f"{name} is a {type(x).__name__}, not a NumPy array: convert it with numpy.asarray()"
                )
            if x.dtype != q.dtype or x.dtype not in self._dtypes:
                raise TypeError(
                    f"{name} is {x.dtype}: rung {self.name} takes {' or '.join(self.dtypes)}, "
                    f"so convert it with .astype({self.dtypes[-1]!r})"
                )
            if name == "logs":
                if x.shape != q.shape[:-1]:
                    raise ValueError(f"logs is {x.shape} and q is {q.shape}: pass what `forward` returned")
                continue
            rows = (k if name in ("k", "v") else q).shape
            if x.ndim < 2 or x.shape != rows or (*rows[:-2], rows[-1]) != (*q.shape[:-2], q.shape[-1]):
                raise ValueError(
                    f"q is {q.shape}, k is {k.shape} and {name} is {x.shape}: pass (..., positions, width), "
                    "where all but the positions agree, and k and v have the same"
                )
        if causal and q.shape != k.shape:
            raise ValueError(f"q is {q.shape} and k is {k.shape}: a causal query needs a key of its own")


def _rows(x: Array) -> Array:
    """Return the array as (heads x positions, width), in C order and aligned, as compiled code reads it."""
    return np.require(x, requirements=["C", "ALIGNED", "ENSUREARRAY"]).reshape(-1, x.shape[-1])
