"""Buckets: many small tensors in one flat one, so that a few large messages replace many small ones.

A message costs its latency however small it is. A bucket holds several gradients one after the other in one
flat tensor; each parameter's `grad` is a view into it, so the gradients are stored once and reduced where
they lie.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section
3.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, bytes_of, ranks_of

MB = 2**20
TOGETHER_BYTES = 25 * MB
"""Bytes of tensors that `together` joins in a message at most; the copy of them takes as much."""


@dataclass(eq=False)
class GradientComm:
    """The ranks that a gradient is exchanged with, and how."""

    group: Group
    algorithm: str = "auto"  # a name that the collectives take
    nothing_left: bool = False  # to do meanwhile: messages are then not handed to a thread, which takes time

    @property
    def ranks(self) -> int:
        """How many they are, this one included."""
        return len(ranks_of(self.group))

    def all_reduce(self, x: Tensor) -> comm.Work | Done:
        """Start to sum `x` over the ranks, in place."""
        if self.nothing_left:
            return Done(comm.all_reduce(x, "sum", self.algorithm, self.group))
        return comm.all_reduce(x, "sum", self.algorithm, self.group, async_op=True)

    def reduce_scatter(self, x: Tensor, out: Tensor, op: str = "sum") -> comm.Work | Done:
        """Start to reduce `x`, (n k,), over the ranks: `out`, (k,), becomes this rank's share."""
        if self.nothing_left:
            return Done(comm.reduce_scatter(x, op, self.algorithm, self.group, out))
        return comm.reduce_scatter(x, op, self.algorithm, self.group, out, async_op=True)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> comm.Work | Done:
        """Start to gather `x`, (k, ...), from all ranks: the work's result is (n k, ...), `out` if given."""
        if self.nothing_left:
            return Done(comm.all_gather(x, self.algorithm, self.group, out))
        return comm.all_gather(x, self.algorithm, self.group, out, async_op=True)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Flat memory for what the ranks exchange, shared where it can be. A collective."""
        if device.type == "cpu":
            return comm.empty_shared((numel,), dtype, self.group)
        return torch.zeros(numel, dtype=dtype, device=device)


@dataclass(frozen=True)
class Done:
    """A message that is complete already."""

    result: Tensor

    def wait(self) -> Tensor:
        """What it brought."""
        return self.result


PendingMessage = comm.Work | Done


@dataclass(eq=False)
class Bucket:
    """Gradients of one dtype on one device, in one flat tensor."""

    places: list[int]  # of the parameters, in the order in which they lie in `flat`
    flat: Tensor  # (elements,), and as many more as were asked for at its end
    views: list[Tensor]  # into `flat`, in the parameters' shapes
    elements: int  # of the gradients

    @classmethod
    def over(cls, flat: Tensor, tensors: Sequence[Tensor], places: list[int]) -> Bucket:
        """A bucket for the gradients of `tensors[place]` at the start of `flat`."""
        views, start = [], 0
        for place in places:
            tensor = tensors[place]
            views.append(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        return cls(places, flat, views, start)


def cut(tensors: Sequence[Tensor], order: Iterable[int], limit: int) -> list[list[int]]:
    """Deal tensors to buckets, each bucket of one dtype and device.

    Args:
        tensors: what the places in `order` number.
        order: the places, in the order in which gradients come.
        limit: bytes that a bucket holds at most; a larger tensor has one to itself. 0: every tensor has.

    Returns:
        The places in each bucket; buckets are in the order in which they become complete.
    """
    done: list[tuple[int, list[int]]] = []  # when a bucket's last gradient comes, and its places
    filling: dict[Any, tuple[int, int, list[int]]] = {}  # bytes, when its last came, places
    for when, place in enumerate(order):
        tensor = tensors[place]
        key, size = (tensor.dtype, tensor.device), bytes_of(tensor)
        held, last, places = filling.get(key, (0, 0, []))
        if places and (not limit or held + size > limit):
            done.append((last, places))
            held, places = 0, []
        filling[key] = (held + size, when, [*places, place])
    done.extend((last, places) for _, last, places in filling.values())
    return [places for _, places in sorted(done)]


def broadcast_together(tensors: Sequence[Tensor], group: Group, source: int = 0) -> None:
    """Copy tensors, parameters or buffers, from one of the group's ranks to all, in place.

    Sends what `comm.broadcast` of their bytes does, in messages of up to 25 MB.
    """
    together(tensors, lambda flat: comm.broadcast(flat, source=source, group=group))


def together(tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
    """Call `send`, which changes a tensor in place, for tensors joined to few flat ones of up to 25 MB."""
    with torch.no_grad():
        for places in cut(tensors, range(len(tensors)), TOGETHER_BYTES):
            chosen = [tensors[place] for place in places]
            if len(chosen) == 1:
                send(chosen[0])
                continue
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in chosen])
            send(flat)
            start = 0
            for tensor in chosen:
                tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()


def require_same(what: str, tensors: Iterable[tuple[str, Tensor]], group: Group) -> None:
    """ValueError, on every rank, where the ranks' tensors differ in names, shapes, dtypes or `requires_grad`.

    Each rank sends 8 (n - 1) bytes.
    """
    digest = hashlib.sha256()
    device = torch.device("cpu")
    for name, tensor in tensors:
        text = f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n"
        digest.update(text.encode())
        device = device if tensor.is_meta else tensor.device
    own = torch.tensor([int.from_bytes(digest.digest()[:7], "big")], device=device)
    everyones = comm.all_gather(own, group=group).tolist()
    different = [rank for rank, each in enumerate(everyones) if each != everyones[0]]
    if different:
        raise ValueError(
            f"the {what} of rank {', '.join(map(str, different))} in the group differ from rank 0's in name, "
            "shape, dtype or requires_grad; build the same module on all ranks"
        )
