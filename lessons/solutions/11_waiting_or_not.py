"""Solutions of lesson 11.

Workers and servers are from Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1, and Li et
al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; the bound on how far workers may
be apart from Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", section 3.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import minidist as md
from minidist import comm


def rates(seconds: list[float]) -> tuple[float, float]:
    """Gradients a second of all workers: where they wait for each other, and where they do not."""
    waiting = len(seconds) / max(seconds)
    not_waiting = sum(1 / each for each in seconds)
    return waiting, not_waiting


def work(gradient, x: torch.Tensor, steps: int) -> None:
    """Pull, compute and push, `steps` times."""
    for _ in range(steps):
        comm.recv(x, 0)
        comm.send(gradient(x), 0)


def serve(x: torch.Tensor, lr: float, steps: int) -> torch.Tensor:
    """Serve all workers at once, `steps` times each; return x."""
    lock = threading.Lock()

    def serve_one(worker: int) -> None:
        for _ in range(steps):
            with lock:
                values = x.clone()  # not half of an update
            comm.send(values, worker)
            gradient = comm.recv(torch.empty_like(x), worker)  # without the lock: others go on meanwhile
            with lock:
                x.sub_(lr * gradient)

    with ThreadPoolExecutor(md.size()) as pool:
        list(pool.map(serve_one, range(1, md.size())))
    return x


def delayed_descent(curvature: float, lr: float, delay: int, steps: int) -> list[float]:
    """Gradient descent from 1 on curvature / 2 x^2, by gradients that are `delay` updates old."""
    x = [1.0]
    for t in range(steps):
        old = x[max(t - delay, 0)]
        x.append(x[t] - lr * curvature * old)
    return x


def may_begin(clocks: list[int], worker: int, bound: float) -> bool:
    """Whether a worker may begin its next step: it is at most `bound` steps ahead of the slowest."""
    return clocks[worker] - min(clocks) <= bound
