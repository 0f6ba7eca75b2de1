"""Attention in parts, some queries of one head each, which one thread or all cores take from a counter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from ....rung import Array
from ...support import thread_pool
from ...support.block_sizes import memory
from ...support.compiling import compiled
from .sizes import QUERIES, backward_memory, forward_memory, most_queries, padded

if TYPE_CHECKING:
    from ...support import atomic
    from . import backward_pass, forward_pass


@compiled("CCCCCC", uses=("atomic", ".attention.support.forward_pass"), nogil=True, boundscheck=False)
def _forward(
    q: Array, k: Array, v: Array, out: Array, logs: Array, space: Array, counter: int,
    heads: int, parts: int, causal: int, skip: int,
) -> None:  # fmt: skip
    part = atomic.fetch_add(counter, 1)
    while part < heads * parts:
        own, seen, first, _ = forward_pass.place(part, heads, parts, q.shape[0], k.shape[0])
        forward_pass.attend(q[own], k[seen], v[seen], out[own], logs[own], space, first, causal, skip)
        part = atomic.fetch_add(counter, 1)


def _together(
    take: Callable[..., None], arrays: tuple[Array, ...], size: int, threads: int, heads: int, parts: int,
    *more: int,
) -> None:  # fmt: skip
    """Let threads, each with memory of `size`, take the parts of all heads from a counter."""
    counter = np.zeros(1, np.int64)

    def work() -> None:
        take(*arrays, memory("attention", "f", size), counter.ctypes.data, heads, parts, *more)

    thread_pool.together(work, min(threads, parts * heads))


def forward(
    q: Array, k: Array, v: Array, out: Array, logs: Array, heads: int, causal: int,
    *, skip: bool, cores: Literal["one", "all"],
) -> None:  # fmt: skip
    """Fill out with softmax(q k^T / sqrt(width)) v, and logs; `skip` leaves out what the mask hides."""
    parts, size = -(-q.shape[0] // (heads * most_queries())), forward_memory(q.shape[1])
    threads = thread_pool.threads() if cores == "all" else 1
    _together(_forward, (q, k, v, out, logs), size, threads, heads, parts, causal, int(skip))


@compiled(
    "CCCCCCCCCC",
    uses=("atomic", ".attention.support.backward_pass", ".attention.support.forward_pass"),
    nogil=True,
    boundscheck=False,
)
def _backward(
    q: Array, k: Array, v: Array, out: Array, d_out: Array, logs: Array, dq: Array, dk: Array, dv: Array,
    space: Array, counter: int, heads: int, parts: int, causal: int,
) -> None:  # fmt: skip
    part = atomic.fetch_add(counter, 1)
    while part < heads * parts:
        own, seen, first, sums = forward_pass.place(part, heads, parts, q.shape[0], k.shape[0])
        inputs, results = (q[own], k[seen], v[seen]), (dq[own], dk[sums], dv[sums])
        backward_pass.attend(inputs, (out[own], d_out[own], logs[own]), results, space, first, causal)
        part = atomic.fetch_add(counter, 1)


def backward(
    q: Array, k: Array, v: Array, out: Array, logs: Array, d_out: Array, dq: Array, dk: Array, dv: Array,
    heads: int, causal: int,
) -> None:  # fmt: skip
    """Fill dq, dk and dv on all cores; each of a head's parts has sums of its own for dk and dv."""
    width, cores = q.shape[1], thread_pool.threads()
    wide, size = padded(width), backward_memory(width)
    parts = min(-(-cores // heads), -(-q.shape[0] // (heads * QUERIES)))
    dk_sums, dv_sums = (np.zeros((parts * k.shape[0], wide), k.dtype) for _ in range(2))
    arrays = q, k, v, out, d_out, logs, dq, dk_sums, dv_sums
    _together(_backward, arrays, size, cores, heads, parts, causal)
    np.sum(dv_sums.reshape(parts, -1, wide)[:, :, :width], 0, out=dv)
    np.sum(dk_sums.reshape(parts, -1, wide)[:, :, :width], 0, out=dk)
    dk *= np.float32(1 / math.sqrt(width))
