"""What collectives give, by one process; from inputs that every dtype adds and multiplies exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "mean": lambda parts: parts.sum(0) / len(parts),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
    "product": lambda parts: parts.prod(0),
}


def exact(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def inputs(seed: int, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """Small whole numbers: (ranks, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (ranks, *shape), generator=generator).to(dtype)


def expected(parts: torch.Tensor, op: str, rank: int, source: int) -> dict[str, Any]:
    """What each operation gives a rank, from the inputs of all: (ranks, rows * ranks, ...)."""
    ranks, rows = len(parts), parts.shape[1] // len(parts)
    reduced = REDUCE[op](parts).to(parts.dtype)
    own = slice(rank * rows, (rank + 1) * rows)
    return {
        "all_reduce": reduced,
        "reduce_scatter": reduced[own],
        "all_gather": parts.flatten(0, 1),
        "broadcast": parts[source],
        "all_to_all": parts[:, own].flatten(0, 1),
        "gather": parts.flatten(0, 1) if rank == source else None,
        "scatter": parts[source][own],
        "recv": parts[(rank - 1) % ranks],
    }
