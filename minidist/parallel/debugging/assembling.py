"""Whole tensors from the pieces that the ranks of a layout hold, so that layouts can be compared.

Data-parallel ranks have different rows, context-parallel ranks different positions of a sequence in zigzag
order. Tensor-parallel ranks have copies, or parts of the sequence, or, of the logits, parts of the last
dimension. Copies that differ are kept apart: the caller looks for such a difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.layout import Layout
from minidist.parallel.flat.gathering import bytes_of, gather_values

RankCopies = list[Tensor]
"""A whole tensor; several if ranks that should hold equal copies do not, or the last dimension is cut."""


def assemble(own: dict[str, Tensor], layout: Layout, length: int) -> dict[str, RankCopies]:
    """Whole tensors from all ranks' pieces, on every rank; all ranks call it.

    Leaves out tensors that only some ranks of a stage have. Sends n - 1 times 8 bytes, and n - 1 times the
    longest rank's pieces with their names.

    own: this rank's pieces by name, on the CPU; other ranks may have other names. Neighbours share matrices
    (tp), then positions (cp), then rows (dp). length: of the whole sequences, if they are cut.
    """
    tensors: list[dict[str, Tensor]] = gather_values(own)
    names = dict.fromkeys(name for found in tensors for name in found)
    found_whole = {name: _whole(name, tensors, layout, length) for name in names}
    return {name: copies for name, copies in found_whole.items() if copies}


def distance(a: RankCopies, b: RankCopies) -> float:
    """The largest difference between elements of two tensors, over all their copies.

    NaN equals NaN. The distance of NaN from a number, and of tensors of different shapes, is infinite.
    """
    a, b = _alike(a, b)
    pairs = zip(a, b, strict=True) if len(a) == len(b) else product(a, b)
    return max(_distance(x, y) for x, y in pairs)


def _alike(a: RankCopies, b: RankCopies) -> tuple[RankCopies, RankCopies]:
    """Both tensors; where that makes the shapes equal, with the parts of a last dimension joined."""
    for x in _forms(a, b):
        for y in _forms(b, a):
            if x[0].shape == y[0].shape:
                return x, y
    return a, b


def _forms(copies: RankCopies, other: RankCopies) -> Iterator[RankCopies]:
    """Yield what the copies may be: copies, or parts; a single one may stand for several equal parts."""
    yield copies
    shapes = {x.shape[:-1] for x in (*copies, *other)}
    if copies[0].dim() < 2 or len(shapes) > 1:
        return
    own, width = (sum(x.shape[-1] for x in each) for each in (copies, other))
    if len(copies) > 1:
        yield [torch.cat(copies, -1)[..., :width]]  # without the padding of the last part
    elif 0 < own < width:
        yield [torch.cat([*copies] * (width // own), -1)]


def _distance(x: Tensor, y: Tensor) -> float:
    if x.shape != y.shape:
        return torch.inf
    x, y = x.double(), y.double()
    apart = (x - y).abs_().masked_fill_((x == y) | (x.isnan() & y.isnan()), 0.0)
    return float(apart.nan_to_num_(torch.inf).max()) if apart.numel() else 0.0


def _whole(name: str, tensors: list[dict[str, Tensor]], layout: Layout, length: int) -> RankCopies:
    """One tensor, joined from rows over dp, positions over cp, and copies or parts over tp."""
    pp, dp, cp, tp = layout.pp, layout.dp, layout.cp, layout.tp
    of_tp = [tensors[rank : rank + tp] for rank in range(0, len(tensors), tp)]  # (pp, dp, cp) flat
    found: RankCopies = []
    for stage in range(pp):
        groups = of_tp[stage * dp * cp : (stage + 1) * dp * cp]
        if not all(name in part for group in groups for part in group):
            continue
        joined: list[RankCopies] = []
        for index, group in enumerate(groups):
            share = zigzag_order.size(length, cp, index % cp) if layout.sequence_parallel else None
            joined.append(_join_tp([part[name] for part in group], share))
        for copy in range(max(map(len, joined))):
            parts = [copies[min(copy, len(copies) - 1)] for copies in joined]
            rows = [parts[row * cp : (row + 1) * cp] for row in range(dp)]
            found.append(torch.cat([zigzag_order.join(each, 1) if cp > 1 else each[0] for each in rows]))
    return found


def _join_tp(parts: list[Tensor], length: int | None) -> RankCopies:
    """The joined sequence, if the parts are shares of one of `length`; or one of equal copies; or all parts.

    The sequence comes first, because its shares may be equal, as zeros are. `length` is None without shares.
    """
    if length is not None and parts[0].dim() > 2 and sum(part.shape[1] for part in parts) == length:
        return [torch.cat(parts, 1)]
    if all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[:1]
    return parts


def distinct(own: dict[str, Tensor]) -> dict[str, RankCopies]:
    """The different values that ranks have of each tensor; all ranks call it, with the same names.

    Sends n - 1 times a table of names with a hash each, and n - 1 times the tensors that differ.
    """
    hashes = gather_values({name: hashlib.sha256(bytes_of(value)).digest() for name, value in own.items()})
    found = {name: [value] for name, value in own.items()}
    for name in (name for name in own if len({each[name] for each in hashes}) > 1):
        copies = gather_values(own[name])
        found[name] = [*{each[name]: copy for each, copy in zip(hashes, copies, strict=True)}.values()]
    return found
