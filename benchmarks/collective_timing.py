"""What each rank of a collectives benchmark does: calls in turn with torch's own, and the sweep of a model.

Runs inside the ranks. Before each turn all meet and write their tensors, as a backward pass would: a tensor
that nobody has touched since the last call is faster to reduce than any real one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import minidist as md
from minidist import comm
from minidist.comm import cost

TURN = 20e-3
"""Seconds that a turn takes about."""


def time_against_gloo(variant: str, size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a call of ours and of gloo's, in turns.

    Args:
        variant: "in place", "copied", "ring", "reduce-scatter" or "reduce-scatter, sockets".
        size: bytes of the tensor, float32.
        rounds: pairs of turns.
    """
    x = torch.zeros(size // 4)
    if variant == "in place":
        x = comm.empty_shared(x.shape)
    other = torch.zeros_like(x)
    share = torch.empty(len(x) // md.size())
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ours: dict[str, Callable[[], object]] = {
        "in place": lambda: comm.all_reduce(x),
        "copied": lambda: comm.all_reduce(x),
        "ring": lambda: comm.all_reduce(x, algorithm="ring"),
        "reduce-scatter": lambda: comm.reduce_scatter(x, out=share),
        "reduce-scatter, sockets": lambda: comm.reduce_scatter(x, out=share, algorithm="torch"),
    }
    peer: Callable[[], object] = lambda: dist.all_reduce(other)  # noqa: E731
    if "scatter" in variant:
        peer = lambda: scatter(share, other)  # noqa: E731
    pairs = [(_turn(ours[variant], x), _turn(peer, other)) for _ in range(rounds + 1)][1:]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _turn(call: Callable[[], object], x: torch.Tensor) -> float:
    """Seconds of one call, of as many as fill a turn; the same number on all ranks."""
    begun = time.perf_counter()
    call()
    once = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    calls = max(1, min(100, int(TURN / float(comm.all_reduce(once, "max")))))
    seconds = 0.0
    for _ in range(calls):
        x.fill_(1.0)
        comm.barrier()
        begun = time.perf_counter()
        call()
        seconds += time.perf_counter() - begun
    return seconds / calls


def sweep(
    algorithms: tuple[str, ...], sizes: tuple[int, ...], rounds: int
) -> dict[tuple[str, int], tuple[list[float], float]]:
    """Seconds of all-reduces by each algorithm at each size, and what `cost` predicts after a fit."""
    profile = cost.fit()
    found: dict[tuple[str, int], tuple[list[float], float]] = {}
    for size in sizes:
        x = torch.zeros(size // 4)
        measured: dict[str, list[float]] = {name: [] for name in algorithms}
        for _ in range(rounds + 1):
            for name, seconds in measured.items():
                seconds.append(_turn(partial(comm.all_reduce, x, algorithm=name), x))
        for name, seconds in measured.items():
            found[name, size] = seconds[1:], cost.predict("all_reduce", name, size, md.size(), profile)
    return found


def median_error(found: dict[tuple[str, int], tuple[list[float], float]]) -> float:
    """The median of the predictions' relative errors."""
    return statistics.median(abs(p / statistics.median(seconds) - 1) for seconds, p in found.values())
