"""Checks of the arguments of collectives and messages: an error names the argument, its value, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist._arguments import is_whole
from minidist._names import unknown

OPERATIONS: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.sum),
    "mean": (dist.ReduceOp.SUM, torch.sum),  # divided after: not every backend averages
    "min": (dist.ReduceOp.MIN, torch.amin),
    "max": (dist.ReduceOp.MAX, torch.amax),
    "product": (dist.ReduceOp.PRODUCT, torch.prod),
}
"""For each `op` its name in torch.distributed, and the function that reduces dimension 0 on one rank."""


def check_tensor(name: str, x: object) -> torch.Tensor:
    """The tensor without its graph, or a TypeError."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes a torch tensor, not a {type(x).__name__}; torch.as_tensor makes one")
    if x.layout != torch.strided:
        raise TypeError(f"{name} takes a dense tensor, not {x.layout}; x.to_dense() makes one")
    return x.detach()


def check_reducible(name: str, x: torch.Tensor, op: str) -> torch.Tensor:
    """The tensor without its graph; an error where `op` is unknown or cannot reduce it."""
    if op not in OPERATIONS:
        raise unknown("op", op, OPERATIONS)
    data = check_tensor(name, x)
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"{name} cannot average {x.dtype}; use op='sum', or convert to a floating-point dtype"
        )
    return data


def check_member(what: str, rank: int, ranks: int) -> None:
    """TypeError where `rank` is no number, ValueError where it is no rank of a group of `ranks`."""
    if not is_whole(rank):
        raise TypeError(f"{what} is {rank!r}; give a rank, from 0 to {ranks - 1}")
    if not 0 <= rank < ranks:
        raise ValueError(f"{what} is {rank}; the group's ranks are 0 to {ranks - 1}")


def rows_per_rank(name: str, x: torch.Tensor, ranks: int) -> int:
    """How many rows each rank gets of `x`; ValueError where the ranks do not divide its first dimension."""
    if x.dim() == 0:
        raise ValueError(
            f"{name} takes a tensor with at least one dimension, not a scalar; x.view(1) makes one"
        )
    if len(x) % ranks:
        raise ValueError(
            f"{name} takes a first dimension that the {ranks} ranks divide, not {len(x)}; "
            f"pad it to {-(-len(x) // ranks) * ranks}"
        )
    return len(x) // ranks


def check_rows(name: str, rows: Sequence[int] | None, x: torch.Tensor, ranks: int) -> list[int]:
    """The rows of an all-to-all's parts, one count for each rank; None stands for equal parts of `x`."""
    if rows is None:
        return [rows_per_rank("all_to_all", x, ranks)] * ranks
    if len(rows) != ranks or any(count < 0 for count in rows):
        raise ValueError(f"{name} is {list(rows)}; give {ranks} counts of rows, one for each rank")
    return list(rows)


def output(name: str, out: torch.Tensor | None, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`out` without its graph, or a new tensor where it is None; ValueError where `out` does not fit."""
    if out is None:
        return x.new_empty(shape)
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"{name}: out is {out.dtype}{list(out.shape)} on {out.device} and has to be "
            f"{x.dtype}{list(shape)} on {x.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"{name}: out has to be contiguous; its strides are {out.stride()}")
    return out.detach()
