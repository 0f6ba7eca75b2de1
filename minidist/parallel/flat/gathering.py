"""Bytes of tensors, and the bytes, or any values, of all ranks on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of


def raw_bytes(x: Tensor) -> memoryview:
    """The bytes of a tensor's elements in order. Copies a tensor that is on a GPU, sparse or with gaps."""
    dense = x.to_dense() if x.layout != torch.strided else x
    flat = dense.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def tensor_of(raw: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor with these bytes."""
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def gather_equal(data: bytes | memoryview, group: Group = None) -> list[bytes]:
    """The bytes of every rank, which all have the same number of them; sends n - 1 times as many."""
    if not data:
        return [b""] * len(ranks_of(group))
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device())
    everyones = bytes(comm.all_gather(own, group=group).cpu().numpy())
    return [everyones[start : start + len(data)] for start in range(0, len(everyones), len(data))]


def gather(data: bytes, group: Group = None) -> list[bytes]:
    """The bytes of every rank; sends n - 1 times 8 bytes, and n - 1 times the length of the longest."""
    sizes = [int.from_bytes(size, "little") for size in gather_equal(len(data).to_bytes(8, "little"), group)]
    padded = gather_equal(data.ljust(max(sizes)), group)
    return [raw[:size] for raw, size in zip(padded, sizes, strict=True)]


def gather_values(value: Any, group: Group = None) -> list[Any]:
    """The values of every rank, pickled; sends what `gather` does. Tensors in them should lie on the CPU.

    This rank's own value is the same object. A value of another rank may have a class that only looks the
    same, if the class was defined in a notebook or a script.
    """
    if len(ranks_of(group)) == 1:
        return [value]
    import cloudpickle

    found = [pickle.loads(data) for data in gather(cloudpickle.dumps(value), group)]
    found[rank_in(group)] = value
    return found
