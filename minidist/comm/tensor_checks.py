"""Which tensors, ranks and reductions calls accept: an error names the argument, its value and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

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


_UNSIGNED = ("uint16", "uint32", "uint64")
_WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_COMPLEX = ("complex32", "complex64", "complex128")
_BOTH = ("all_reduce", "reduce_scatter")
_AUTO = "give algorithm='auto'"


class Refusal(NamedTuple):
    """Reductions that are refused, on every rank, before anything is sent."""

    operations: tuple[str, ...]
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    algorithm: str  # "any" for all
    why: str
    remedy: str


_NOT_WHOLE = "a mean need not be whole"
REFUSALS = (
    Refusal(_BOTH, ("mean",), _WHOLE, "any", _NOT_WHOLE, "use op='sum', or convert to floats"),
    Refusal(_BOTH, ("mean",), _UNSIGNED, "any", _NOT_WHOLE, "convert to floats"),
    Refusal(_BOTH, ("min", "max"), _COMPLEX, "any", "complex numbers have no order", "convert to floats"),
    Refusal(_BOTH, ("mean",), ("complex32",), "any", "torch cannot divide it", "convert to torch.complex64"),
    Refusal(_BOTH, ("sum", "min", "max"), _UNSIGNED, "any", "torch cannot do it", "convert to torch.int64"),
    Refusal(_BOTH, tuple(OPERATIONS), _FLOAT8, "any", "torch only stores it", "convert to torch.float32"),
    Refusal(
        ("all_reduce",), ("sum", "min", "max", "product"), ("int16",), "torch", "gloo cannot do it", _AUTO
    ),
    Refusal(("all_reduce",), ("product",), (*_UNSIGNED, *_COMPLEX), "torch", "gloo cannot do it", _AUTO),
    Refusal(
        ("reduce_scatter",), ("sum", "product"), ("complex32",), "torch", "torch cannot do it alone", _AUTO
    ),
)
"""All reductions that are refused for their dtype; docs/architecture.md shows this table. Calls that only
move bytes accept every dtype."""


@cache
def refusal(operation: str, op: str, dtype: torch.dtype, algorithm: str) -> Refusal | None:
    """Return the row of `REFUSALS` that forbids a reduction; None if it is allowed."""
    name = str(dtype).removeprefix("torch.")
    for row in REFUSALS:
        by_algorithm = row.algorithm in ("any", algorithm)
        if operation in row.operations and op in row.ops and name in row.dtypes and by_algorithm:
            return row
    return None


def check_tensor(name: str, x: object) -> torch.Tensor:
    """Return the tensor without its graph, with its values in memory; TypeError if it cannot be sent."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes a torch tensor, not a {type(x).__name__}; torch.as_tensor makes one")
    if x.layout != torch.strided:
        raise TypeError(f"{name} takes a dense tensor, not {x.layout}; x.to_dense() makes one")
    if x.is_meta or x.is_quantized:
        what, remedy = (
            ("a tensor on the meta device", "give it memory with torch.empty_like(x, device='cpu')")
            if x.is_meta
            else (f"the quantized {x.dtype}", "x.dequantize() makes floats of it")
        )
        raise TypeError(f"{name} takes a tensor with plain values, not {what}; {remedy}")
    data = x.detach()
    # The memory of such a view holds other numbers than it shows.
    return data.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else data


def check_in_place(name: str, x: object) -> torch.Tensor:
    """As `check_tensor`, for a tensor that receives the result: ValueError if elements share memory."""
    data = check_tensor(name, x)
    strides = data.stride()
    if 0 in strides and any(step == 0 and size > 1 for step, size in zip(strides, data.shape, strict=True)):
        raise ValueError(
            f"{name} writes into x, and elements of x share memory (its strides are {strides}); "
            "x.contiguous() makes a copy that has its own"
        )
    return data


def check_reducible(name: str, x: torch.Tensor, op: str, algorithm: str, in_place: bool) -> torch.Tensor:
    """Return the tensor without its graph; raise an error if `op` is unknown or cannot reduce it."""
    if op not in OPERATIONS:
        raise unknown("op", op, OPERATIONS)
    data = check_in_place(name, x) if in_place else check_tensor(name, x)
    row = refusal(name, op, x.dtype, algorithm)
    if row is not None:
        verb = "average" if op == "mean" else f"take the {op} of"
        by = "" if row.algorithm == "any" else f" by algorithm {algorithm!r}"
        raise TypeError(f"{name} cannot {verb} {x.dtype}{by}: {row.why}; {row.remedy}")
    return data


def check_member(what: str, rank: int, ranks: int) -> None:
    """Raise TypeError if `rank` is not an integer, ValueError if it is not a rank of a group of `ranks`."""
    if not is_whole(rank):
        raise TypeError(f"{what} is {rank!r}; give a rank, from 0 to {ranks - 1}")
    if not 0 <= rank < ranks:
        raise ValueError(f"{what} is {rank}; the group's ranks are 0 to {ranks - 1}")


def rows_per_rank(name: str, x: torch.Tensor, ranks: int) -> int:
    """Return how many rows of `x` each rank gets; ValueError if the ranks do not divide its length."""
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
    """Return the rows of an all-to-all's parts, one for each rank; None stands for equal parts of `x`."""
    if rows is None:
        return [rows_per_rank("all_to_all", x, ranks)] * ranks
    if len(rows) != ranks or any(count < 0 for count in rows):
        raise ValueError(f"{name} is {list(rows)}; give {ranks} counts of rows, one for each rank")
    return list(rows)


def output(name: str, out: torch.Tensor | None, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `out` without its graph, or a new tensor if it is None; ValueError if `out` does not fit."""
    if out is None:
        return x.new_empty(shape)
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"{name}: out is {out.dtype}{list(out.shape)} on {out.device} and has to be "
            f"{x.dtype}{list(shape)} on {x.device}"
        )
    check_plain(name, out)
    return out.detach()


def check_plain(name: str, out: torch.Tensor) -> None:
    """Raise ValueError if a result cannot be written into the memory of `out` as it is."""
    if not out.is_contiguous():
        raise ValueError(f"{name}: out has to be contiguous; its strides are {out.stride()}")
    if out.is_conj() or out.is_neg():
        raise ValueError(f"{name}: out is a conjugate or negative view; give the tensor that it is a view of")
