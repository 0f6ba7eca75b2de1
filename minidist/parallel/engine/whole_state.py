"""`collect`: the tensors of a training, whole, on rank 0, from the boxes that all ranks hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.flat.gathering import bytes_of, gather_values, tensor_of
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.training.moved_results import MARGIN


class Collected(NamedTuple):
    """Tensors of all ranks."""

    whole: dict[str, Tensor]  # on rank 0; empty elsewhere
    replicas: list[str]  # names of tensors of which two ranks hold different copies


def collect(boxes: Iterable[TensorBox], device: torch.device) -> Collected:
    """Whole tensors on rank 0 from the boxes that all ranks hold; a collective.

    Ranks exchange tables of their boxes, some 100 bytes each. Each box comes from the lowest rank with it.
    """
    own = [*boxes]
    table = [
        (
            b.name,
            b.shape,
            b.offsets,
            tuple(b.tensor.shape),
            str(b.tensor.dtype).removeprefix("torch."),
            *_sums(b),
        )
        for b in own
    ]
    tables = gather_values(table)
    holder: dict[Any, tuple[int, float, float]] = {}
    replicas: dict[str, None] = {}
    for rank, rows in enumerate(tables):
        for name, _, offsets, sizes, dtype, total, size in rows:
            at, *sums = holder.setdefault((name, offsets, sizes), (rank, total, size))
            kind = getattr(torch, dtype)
            bits = torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0
            apart = max(abs(total - sums[0]), abs(size - sums[1]))
            both_nan = total != total and sums[0] != sums[0]
            if at != rank and not apart <= MARGIN * bits * sums[1] and not both_nan:
                replicas[name] = None
    mine = comm.rank()
    sent = {
        rank: [row for row in rows if holder[row[0], row[2], row[3]][0] == rank]
        for rank, rows in enumerate(tables)
    }
    whole: dict[str, Tensor] = {}
    if mine:
        raw = b"".join(
            bytes_of(b.tensor) for b in own if holder[b.name, b.offsets, tuple(b.tensor.shape)][0] == mine
        )
        if raw:
            comm.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(comm.device()), 0)
        return Collected(whole, [*replicas])
    for rank, rows in sent.items():
        kinds = [(getattr(torch, row[4]), torch.Size(row[3])) for row in rows]
        ends = [0]
        for kind, size in kinds:
            ends.append(ends[-1] + kind.itemsize * size.numel())
        raw = b""
        if rank and ends[-1]:
            empty = torch.empty(ends[-1], dtype=torch.uint8, device=comm.device())
            raw = bytes(comm.recv(empty, rank).cpu().numpy())
        here = {(b.name, b.offsets, tuple(b.tensor.shape)): b.tensor for b in own} if not rank else {}
        for row, (kind, size), start, end in zip(rows, kinds, ends, ends[1:], strict=False):
            value = (
                here[row[0], row[2], row[3]].detach() if not rank else tensor_of(raw[start:end], kind, size)
            )
            if row[0] not in whole:
                whole[row[0]] = torch.zeros(row[1], dtype=kind, device=device)
            narrowed(whole[row[0]], row[2], row[3]).copy_(value)
    return Collected(whole, [*replicas])


def _sums(box: TensorBox) -> tuple[float, float]:
    """Two numbers that equal copies share up to rounding: the sum, and that of the magnitudes."""
    x = box.tensor.detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    x = x.double()
    return float(x.sum()), float(x.abs().sum())
