"""Time collectives: our calls in turns with torch's, and a sweep that tests the cost model's predictions.

This code runs inside the ranks. Before each call the ranks write their tensors, as a backward pass would, and
wait for each other: a tensor that nobody has touched since the last call reduces faster than any real one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.formats import binary_size
from minidist.benchmarks.harness.turns import Benchmark, clear, measure_pair, record
from minidist.comm import cost

TURN = 20e-3
"""Approximate length of a turn in seconds."""


def time_against_torch(
    variant: str, size: int, rounds: int, device: str = "cpu"
) -> tuple[list[float], list[float]]:
    """Time one of our calls in turns with torch.distributed's; return the seconds of a call in each turn.

    Args:
        variant: a key of `SENT`.
        size: bytes of the larger of the two tensors, float32.
        rounds: pairs of turns; fewer once the difference is clear to all ranks.
        device: "cpu", where torch's calls use gloo, or "cuda", where they use NCCL and our algorithms run
            on top of NCCL.
    """
    device = str(comm.device()) if device == "cuda" else device
    x = torch.zeros(size // 4 // md.size() * md.size(), device=device)  # equal shares
    if variant == "in place":
        x = comm.empty_shared(x.shape)
    other, share = torch.zeros_like(x), torch.zeros(len(x) // md.size(), device=device)
    part = x[: len(share)]
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    ours: dict[str, Callable[[], object]] = {
        **dict.fromkeys(("in place", "copied", "all-reduce"), lambda: comm.all_reduce(x)),
        "ring": lambda: comm.all_reduce(x, algorithm="ring"),
        "reduce-scatter": lambda: comm.reduce_scatter(x, out=share),
        "reduce-scatter, sockets": lambda: comm.reduce_scatter(x, out=share, algorithm="torch"),
        "all-gather": lambda: comm.all_gather(part, out=other),
        "broadcast": lambda: comm.broadcast(x),
        "all-to-all": lambda: comm.all_to_all(x),
    }
    peers: dict[str, Callable[[], object]] = {
        **dict.fromkeys(("reduce-scatter", "reduce-scatter, sockets"), lambda: scatter(share, other)),
        "all-gather": lambda: gather(other, part),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all-to-all": lambda: dist.all_to_all_single(other, x),
    }
    peer = peers.get(variant, lambda: dist.all_reduce(other))
    written = other if variant not in ("all-gather", "broadcast", "all-to-all") else x

    def clear_to_all(*seconds: Sequence[float]) -> bool:
        return bool(comm.all_reduce(torch.tensor(float(clear(*seconds))), "min"))

    timed = partial(_turn, ours[variant], x), partial(_turn, peer, written)
    return measure_pair(*timed, rounds=rounds, early=clear_to_all)


SENT: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(("in place", "copied", "all-reduce", "ring"), lambda n: 2 * (n - 1) / n),
    **dict.fromkeys(("reduce-scatter", "reduce-scatter, sockets"), lambda n: (n - 1) / n),
    **dict.fromkeys(("all-gather", "all-to-all"), lambda n: (n - 1) / n),
    "broadcast": lambda n: 1.0,
}
"""For each variant, a function of the number of ranks: the bytes a rank sends over the larger tensor's."""


def _turn(call: Callable[[], object], x: torch.Tensor) -> float:
    """Return the seconds of one call, averaged over the calls of a turn; all ranks make the same number."""
    begun = time.perf_counter()
    call()
    _wait(x)
    once = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    calls = max(1, min(100, int(TURN / float(comm.all_reduce(once, "max")))))
    seconds = 0.0
    for _ in range(calls):
        x.fill_(1.0)
        comm.barrier()
        _wait(x)
        begun = time.perf_counter()
        call()
        _wait(x)
        seconds += time.perf_counter() - begun
    return seconds / calls


def _wait(x: torch.Tensor) -> None:
    """Wait until the GPU, if `x` is on one, has finished."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def fitted(profile: cost.LinkProfile, algorithm: str, ranks: int) -> dict[str, float]:
    """Return the alpha (seconds) and beta (seconds per byte) behind a prediction, with the other figures.

    For shared memory, alpha is the time ranks take to meet, and beta the time to copy a byte of an all-reduce
    in, combine it and copy it out.
    """
    if algorithm == "shared_memory":
        assert profile.memory is not None
        own = asdict(profile.memory)
        beta = own["put"] + own["take"] + (ranks - 1) / ranks * own["combine"]
        return {"alpha": own["meet"], "beta": beta, **own}
    link = profile.links.get(algorithm, profile.links["messages"])
    figures = {**asdict(link), "gamma": profile.gamma}
    return {name: value for name, value in figures.items() if value is not None}


Found = dict[tuple[str, int], tuple[list[float], float]]
"""For each algorithm and size in bytes: the measured seconds and the predicted ones."""


def sweep(
    algorithms: tuple[str, ...], sizes: tuple[int, ...], rounds: int
) -> tuple[Found, dict[str, dict[str, float]]]:
    """Time all-reduces by each algorithm at each size, and predict them with `cost` after a fit.

    Returns:
        Measured and predicted seconds, and for each algorithm the figures of `fitted`.
    """
    profile = cost.fit()
    found: Found = {}
    for size in sizes:
        x = torch.zeros(size // 4)
        measured: dict[str, list[float]] = {name: [] for name in algorithms}
        for _ in range(rounds + 1):
            for name, seconds in measured.items():
                seconds.append(_turn(partial(comm.all_reduce, x, algorithm=name), x))
        for name, seconds in measured.items():
            found[name, size] = seconds[1:], cost.predict("all_reduce", name, size, md.size(), profile)
    return found, {name: fitted(profile, name, md.size()) for name in algorithms}


def median_error(found: Found) -> float:
    """Return the median of the predictions' relative errors."""
    return statistics.median(abs(p / statistics.median(seconds) - 1) for seconds, p in found.values())


def enter(benchmark: Benchmark, timed: list[Any], variant: str, size: int, label: str, peer: str) -> None:
    """Store what `time_against_torch` returned on all ranks as the benchmark's result."""
    # A collective ends when its slowest rank ends.
    ours, theirs = ([max(turn) for turn in zip(*times, strict=True)] for times in zip(*timed, strict=True))
    record(benchmark, ours, theirs, peer)
    ranks = len(timed)
    benchmark.extra_info |= {
        "label": f"{label}, {binary_size(size)}, {ranks} ranks",
        "ranks": ranks,
        "bytes": size,
        "bus_gb_per_s": SENT[variant](ranks) * size / statistics.median(ours) / 1e9,
    }
