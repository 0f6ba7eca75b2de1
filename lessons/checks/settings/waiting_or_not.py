"""Settings of `waiting_or_not`: one rank plays the other side, and writes down what it sees of the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import minidist as md
from minidist import comm

PATIENCE = 5.0
"""Seconds that a slow worker waits for a fast one to finish; with a server that serves both it takes none."""


def with_server(function: Callable[..., Any], x: Tensor, scale: float, steps: int) -> Any:
    """Rank 0 serves the workers in turn; the others work as the answer does, and count its gradients."""
    if md.rank() > 0:
        computed = []

        def gradient(values: Tensor) -> Tensor:
            computed.append(values.clone())
            return values * scale

        function(gradient, x, steps)
        return len(computed)
    pushes = []
    for step in range(steps):
        for worker in range(1, md.size()):
            comm.send(values_at(step, worker, len(x)), worker)
            pushes.append((step, worker, comm.recv(torch.empty_like(x), worker)))
    return pushes


def values_at(step: int, worker: int, size: int) -> Tensor:
    """What the check's server has for a worker; never the same."""
    return torch.arange(1, size + 1, dtype=torch.float64) + 10 * worker + 100 * step


READS = {"clone", "__add__", "add", "__sub__", "sub", "__rsub__", "__mul__", "mul"}
WRITES = {"sub_", "add_", "copy_", "mul_", "__isub__", "__iadd__", "__setitem__"}


def watched(x: Tensor) -> tuple[Tensor, list[str]]:
    """x on the same memory, and a list that names an operation in which two threads used it at once.

    Each use of it lasts some milliseconds, as it would with many parameters: without a lock threads meet.
    """
    clashes: list[str] = []
    inside: list[bool] = []  # of each use under way, whether it writes

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = function.__name__
            used = name in READS | WRITES
            if used:
                if inside and (name in WRITES or any(inside)):
                    clashes.append(name)
                inside.append(name in WRITES)
                time.sleep(0.003)
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))
            finally:
                if used:
                    inside.remove(name in WRITES)

    return x.as_subclass(Watched), clashes


def with_workers(function: Callable[..., Any], x: Tensor, lr: float, steps: int, kind: str, path: str) -> Any:
    """Rank 0 serves as the answer does; the others pull and push, and keep what they pulled."""
    if md.rank() == 0:
        seen, clashes = watched(x)
        result = function(seen, lr, steps)
        return (result.as_subclass(Tensor) if isinstance(result, Tensor) else result), clashes
    pulled, late = [], False
    for step in range(steps):
        comm.recv(x, 0)
        pulled.append(x.clone())
        if kind == "slow" and md.rank() == 1 and step == 0:
            late = not _comes(path)
        comm.send(_gradient(kind, x), 0)
    if md.rank() == 2:
        Path(path).touch()
    return pulled, late


def _gradient(kind: str, x: Tensor) -> Tensor:
    if kind == "towards 4":
        return x - 4
    own = torch.zeros_like(x)  # each worker has an element of its own
    own[md.rank() - 1] = 2.0
    return own


def _comes(path: str) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if Path(path).exists():
            return True
        time.sleep(0.002)
    return False
