"""Solutions of lesson 8.

The ring is from Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 3.
"""

from __future__ import annotations

import torch

import minidist as md
from minidist import comm


def shift(x: torch.Tensor) -> torch.Tensor:
    """Give x to the next rank; return what the rank before gave."""
    r, n = md.rank(), md.size()
    if n == 1:
        return x.clone()
    arrived = torch.empty_like(x)
    work = comm.send(x, (r + 1) % n, async_op=True)  # begun, so that this rank can listen
    comm.recv(arrived, (r - 1) % n)
    work.wait()
    return arrived


def ring_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks; return part r of torch.tensor_split(n). Uses x as its scratch paper."""
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        gives, takes = parts[(r - 1 - s) % n], parts[(r - 2 - s) % n]
        arrived = torch.empty_like(takes)
        work = comm.send(gives, (r + 1) % n, async_op=True)
        comm.recv(arrived, (r - 1) % n)
        work.wait()
        takes.add_(arrived)  # a view of x: the next step sends it on
    return parts[r]


def ring_all_gather(x: torch.Tensor) -> torch.Tensor:
    """Part r of x is filled on rank r; fill all parts on all ranks, in place, and return x."""
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        gives, takes = parts[(r - s) % n], parts[(r - 1 - s) % n]
        work = comm.send(gives, (r + 1) % n, async_op=True)
        comm.recv(takes, (r - 1) % n)
        work.wait()
    return x


def ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum x over all ranks, in place; return it."""
    ring_reduce_scatter(x)
    return ring_all_gather(x)


def ring_seconds(size: float, ranks: int, alpha: float, beta: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: 2 (n - 1) messages of size / n bytes."""
    return 2 * (ranks - 1) * (alpha + beta * size / ranks)
