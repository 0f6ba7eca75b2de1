"""Whole tensors from the pieces that the ranks of a layout have, to compare layouts by.

Rows are dealt over dp, positions of a sequence over cp in zigzag order. Ranks that differ in tp alone have
copies, or parts of the sequence, or, at the vocabulary's end, of the last dimension. Copies that differ are
kept apart: that they differ is what somebody looks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.layout import Layout

RankCopies = list[Tensor]
"""A whole tensor; several where ranks that should hold the same do not, or its last dimension is cut."""


def assemble(own: dict[str, Tensor], layout: Layout, length: int) -> dict[str, RankCopies]:
    """Whole tensors from all ranks' pieces, on every rank; all ranks call it.

    What only some ranks of a stage have is left out. Sends 16 (n - 1) bytes, n - 1 times the longest rank's
    table of names and shapes, and as often its data.

    Args:
        own: this rank's pieces, by name, on CPUs; other ranks may have other names.
        layout: of the ranks; neighbours share matrices (tp), then positions (cp), then rows (dp).
        length: of the whole sequences, where they are cut.
    """
    tables = [json.loads(text) for text in _exchange(json.dumps(_table(own)).encode())]
    tensors: list[dict[str, Tensor]] = [{} for _ in tables]
    raw = _exchange(b"".join(_bytes(value) for value in own.values()))
    for found, table, data in zip(tensors, tables, raw, strict=True):
        at = 0
        for name, dtype, shape in table:
            kind = getattr(torch, dtype)
            end = at + torch.Size(shape).numel() * kind.itemsize
            found[name], at = _tensor(data[at:end], kind, shape), end
    names = dict.fromkeys(name for found in tensors for name in found)
    sizes = [getattr(layout, axis, 1) for axis in ("pp", "dp", "cp", "tp")]
    shares = layout.sequence_parallel
    found_whole = {name: _whole(name, tensors, sizes, length, shares) for name in names}
    return {name: copies for name, copies in found_whole.items() if copies}


def distance(a: RankCopies, b: RankCopies) -> float:
    """The largest difference between elements of two tensors, of all their copies.

    NaNs are equal to each other; it is infinite where there is one against a number, and for other shapes.
    """
    a, b = _alike(a, b)
    pairs = zip(a, b, strict=True) if len(a) == len(b) else product(a, b)
    return max(_distance(x, y) for x, y in pairs)


def _alike(a: RankCopies, b: RankCopies) -> tuple[RankCopies, RankCopies]:
    """Both, with parts of a last dimension that tensor parallelism cut joined, where that makes them fit."""
    for x in _forms(a, b):
        for y in _forms(b, a):
            if x[0].shape == y[0].shape:
                return x, y
    return a, b


def _forms(copies: RankCopies, other: RankCopies) -> Iterator[RankCopies]:
    """What the copies may stand for: themselves, or parts; one for all where all parts are equal."""
    yield copies
    shapes = {x.shape[:-1] for x in (*copies, *other)}
    if copies[0].dim() < 2 or len(shapes) > 1:
        return
    own, width = (sum(x.shape[-1] for x in each) for each in (copies, other))
    if len(copies) > 1:
        yield [torch.cat(copies, -1)[..., :width]]  # without what pads the last part
    elif 0 < own < width:
        yield [torch.cat([*copies] * (width // own), -1)]


def _distance(x: Tensor, y: Tensor) -> float:
    if x.shape != y.shape:
        return torch.inf
    x, y = x.double(), y.double()
    apart = (x - y).abs_().masked_fill_((x == y) | (x.isnan() & y.isnan()), 0.0)
    return float(apart.nan_to_num_(torch.inf).max()) if apart.numel() else 0.0


def _whole(
    name: str, tensors: list[dict[str, Tensor]], sizes: list[int], length: int, shares: bool
) -> RankCopies:
    """One tensor: rows over dp, positions over cp, and over tp copies, or parts where they are cut."""
    pp, dp, cp, tp = sizes
    by_place = [tensors[rank : rank + tp] for rank in range(0, len(tensors), tp)]  # (pp, dp, cp) flat
    found: RankCopies = []
    for stage in range(pp):
        places = by_place[stage * dp * cp : (stage + 1) * dp * cp]
        if not all(name in part for place in places for part in place):
            continue
        joined: list[RankCopies] = [
            _join_tp(
                [part[name] for part in place], zigzag_order.size(length, cp, index % cp) if shares else None
            )
            for index, place in enumerate(places)
        ]
        for copy in range(max(map(len, joined))):
            parts = [copies[min(copy, len(copies) - 1)] for copies in joined]
            rows = [_join_cp(parts[row * cp : (row + 1) * cp]) for row in range(dp)]
            found.append(torch.cat(rows))
    return found


def _join_cp(parts: list[Tensor]) -> Tensor:
    """Parts of a sequence in zigzag order, (rows, T, ...)."""
    if len(parts) == 1:
        return parts[0]
    length = sum(part.shape[1] for part in parts)
    order = torch.cat([zigzag_order.positions(length, len(parts), rank) for rank in range(len(parts))])
    return torch.cat(parts, 1)[:, order.argsort()]


def _join_tp(parts: list[Tensor], length: int | None) -> RankCopies:
    """The one tensor that all have; or parts of the last dimension; or, joined, of a sequence of `length`.

    length: None where no sequence is shared. It comes first: shares may be equal, as zeros are.
    """
    if length is not None and parts[0].dim() > 2 and sum(part.shape[1] for part in parts) == length:
        return [torch.cat(parts, 1)]
    if all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[:1]
    return parts


def distinct(own: dict[str, Tensor]) -> dict[str, RankCopies]:
    """The different values that the ranks have of each tensor; all ranks call it, with the same names.

    Sends n - 1 times a table of names, each with a hash of 64 letters, and those tensors that differ.
    """
    hashes = {name: hashlib.sha256(_bytes(value)).hexdigest() for name, value in own.items()}
    everyones = [json.loads(text) for text in _exchange(json.dumps(hashes).encode())]
    found = {name: [value] for name, value in own.items()}
    for name in (name for name in own if len({each[name] for each in everyones}) > 1):
        copies = [_tensor(raw, own[name].dtype, own[name].shape) for raw in _exchange(_bytes(own[name]))]
        by_hash = {each[name]: copy for each, copy in zip(everyones, copies, strict=True)}
        found[name] = [*by_hash.values()]
    return found


def _table(own: dict[str, Tensor]) -> list[Any]:
    return [(name, str(x.dtype).removeprefix("torch."), [*x.shape]) for name, x in own.items()]


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _tensor(raw: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def _exchange(data: bytes) -> list[bytes]:
    """The bytes of every rank, in order."""
    size = comm.all_gather(torch.tensor([len(data)])).tolist()
    padded = torch.frombuffer(bytearray(data.ljust(max(*size, 1))), dtype=torch.uint8)
    everyones = comm.all_gather(padded).view(len(size), -1)
    return [row[:count].numpy().tobytes() for row, count in zip(everyones, size, strict=True)]
