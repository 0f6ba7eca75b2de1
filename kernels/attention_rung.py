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

from .rung import Array, Step, dtype_name

BACKWARD = {"cpu": "s7_backward", "cuda": "s5_backward"}  # the rung of each ladder that has a backward pass


@dataclass(frozen=True)
class AttentionRung(Step):
    """One step of a ladder of attention; its file ends in `RUNG = AttentionRung.of_file(...)`.

    `compute(q, k, v, out, logs, heads, causal)` overwrites out and logs (heads x queries, 1). It is called
    with sizes >= 1, and arrays in C order that share no memory.
    """

    # gradients(q, k, v, out, logs, d_out, dq, dk, dv, heads, causal) overwrites dq, dk and dv.
    gradients: Callable[..., None] | None = None

    def attention(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        """Return the values that each query attends to, (..., queries, width).

        With `causal`, a query sees the keys up to its own position. Sizes may be anything, and so may
        strides. Without keys the result is zeros. Raises TypeError for anything but arrays of one dtype that
        this rung takes, ValueError for shapes that do not fit.
        """
        return self.forward(q, k, v, causal=causal)[0]

    def forward(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> tuple[Any, Any]:
        """Return `attention`, and the logarithms of its softmax's sums (..., queries) for `backward`."""
        self._check(causal, q=q, k=k, v=v)
        out, logs = self._full(q, q.shape, 0.0), self._full(q, q.shape[:-1], -math.inf, logs=True)
        if 0 not in (*q.shape, *k.shape):
            self._run(self.compute, (q, k, v), (out, logs[..., None]), causal)
        return out, logs

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, logs: Any, d_out: Any, *, causal: bool = False
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v for those of `out`, given what `forward` returned.

        Raises RuntimeError if this rung has no backward pass; otherwise as `attention`.
        """
        if self.gradients is None:
            raise RuntimeError(f"rung {self.name} has no backward pass: take {BACKWARD[self.device]}")
        self._check(causal, q=q, k=k, v=v, out=out, d_out=d_out, logs=logs)
        dq, dk, dv = (self._full(x, x.shape, 0.0) for x in (q, k, v))
        if 0 not in (*q.shape, *k.shape):
            self._run(self.gradients, (q, k, v, out, logs[..., None], d_out), (dq, dk, dv), causal)
        return dq, dk, dv

    def _full(self, like: Any, shape: tuple[int, ...], value: float, logs: bool = False) -> Any:
        """Return a new array full of `value`, with the dtype of `like`, or with that of its logs."""
        return np.full(shape, value, logs_dtype(like) if logs else like.dtype)

    def _run(
        self, function: Callable[..., None], given: tuple[Any, ...], results: tuple[Any, ...], causal: bool
    ) -> None:
        """Call `compute` or `gradients` for arrays that are not empty."""
        heads = math.prod(given[0].shape[:-2])
        function(*map(as_rows, given), *map(as_rows, results), heads, int(causal))

    def _kind(self, q: Any) -> tuple[Any, str, str]:
        """Return the class that all arguments must have, its name, and how to convert a dtype."""
        return np.ndarray, "a NumPy array: convert it with numpy.asarray()", ".astype('{}')"

    def _check(self, causal: bool, **arrays: Any) -> None:
        if causal not in (False, True):
            raise TypeError(f"causal is {causal!r}: give True or False")
        q, k = arrays["q"], arrays["k"]
        kind, wanted, conversion = self._kind(q)
        for name, x in arrays.items():
            if not isinstance(x, kind):
                raise TypeError(f"{name} is a {type(x).__name__}, not {wanted}")
            takes = (logs_dtype(q),) if name == "logs" else self.dtypes
            if dtype_name(x.dtype) not in takes or (name != "logs" and x.dtype != q.dtype):
                raise TypeError(
                    f"{name} is {dtype_name(x.dtype)}: rung {self.name} takes {' or '.join(takes)}, "
                    f"so convert it with {conversion.format(takes[-1])}"
                )
            if name == "logs":
                if x.shape != q.shape[:-1]:
                    raise ValueError(f"logs is {x.shape} and q is {q.shape}: pass what `forward` returned")
                continue
            rows = (k if name in ("k", "v") else q).shape
            if x.ndim < 2 or x.shape != rows or (*rows[:-2], rows[-1]) != (*q.shape[:-2], q.shape[-1]):
                others = "" if name in ("q", "k") else f" and {name} is {x.shape}"
                raise ValueError(
                    f"q is {q.shape}, k is {k.shape}{others}: pass (..., positions, width), "
                    "where all but the positions agree, and k and v have the same"
                )
        if causal and q.shape != k.shape:
            raise ValueError(f"q is {q.shape} and k is {k.shape}: a causal query needs a key of its own")


def logs_dtype(q: Any) -> str:
    """Return the name of the dtype of logs, and of all sums: float32 for elements of 16 bits."""
    return "float32" if q.dtype.itemsize == 2 else dtype_name(q.dtype)


def as_rows(x: Array) -> Array:
    """Return the array as (heads x positions, width), in C order and aligned, as compiled code reads it."""
    return np.require(x, requirements=["C", "ALIGNED", "ENSUREARRAY"]).reshape(-1, x.shape[-1])
