"""Buckets: many small tensors in one flat one, so that a few large messages replace many small ones.

Every message costs its latency, however small it is. A bucket holds several gradients one after the other in
one flat tensor. Each parameter's `grad` is a view into it, so gradients are stored once and reduced in place.

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
"""Most bytes of tensors that `together` joins in one message; joining them copies as many bytes."""


@dataclass(frozen=True)
class Done:
    """A message that is complete already."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result at once."""
        return self.result


PendingMessage = comm.Work | Done


@dataclass(eq=False)
class GradientComm:
    """The ranks that gradients are summed over, and the collectives that do it."""

    group: Group
    algorithm: str = "auto"  # a name that the collectives take
    blocking: bool = (
        False  # nothing is left to compute meanwhile: handing a message to a thread only costs time
    )

    @property
    def ranks(self) -> int:
        """The number of ranks, this one included."""
        return len(ranks_of(self.group))

    def all_reduce(self, x: Tensor) -> PendingMessage:
        """Start to sum `x` over the ranks, in place."""
        return self._start(comm.all_reduce, x, "sum", self.algorithm, self.group)

    def reduce_scatter(self, x: Tensor, out: Tensor, op: str = "sum") -> PendingMessage:
        """Start to reduce `x`, (n k,), over the ranks: `out`, (k,), becomes this rank's share."""
        return self._start(comm.reduce_scatter, x, op, self.algorithm, self.group, out)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> PendingMessage:
        """Start to gather `x`, (k, ...), from all ranks: the result is (n k, ...), in `out` if given."""
        return self._start(comm.all_gather, x, self.algorithm, self.group, out)

    def _start(self, collective: Callable[..., Any], *args: Any) -> PendingMessage:
        message: PendingMessage = (
            Done(collective(*args)) if self.blocking else collective(*args, async_op=True)
        )
        return message

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Flat memory for messages; on a CPU the ranks share it where they can. A collective."""
        if device.type == "cpu":
            return comm.empty_shared((numel,), dtype, self.group)
        return torch.zeros(numel, dtype=dtype, device=device)


@dataclass(eq=False)
class Bucket:
    """Gradients of one dtype on one device, in one flat tensor."""

    param_indices: list[int]  # of the parameters, in the order in which their gradients lie in `flat`
    flat: Tensor  # (elements,), or longer where other numbers are sent at its end
    views: list[Tensor]  # into `flat`, in the parameters' shapes
    elements: int  # of the gradients

    @classmethod
    def over(cls, flat: Tensor, tensors: Sequence[Tensor], param_indices: list[int]) -> Bucket:
        """Make a bucket at the start of `flat` for the gradients of the tensors at these indices."""
        views, start = [], 0
        for index in param_indices:
            tensor = tensors[index]
            views.append(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        return cls(param_indices, flat, views, start)


def cut(tensors: Sequence[Tensor], order: Iterable[int], limit: int) -> list[list[int]]:
    """Deal tensors to buckets of one dtype and device each; return the indices in each bucket.

    order: indices of tensors, in the order in which their gradients come; the buckets become complete in the
    order returned. limit: the most bytes in a bucket; a larger tensor has one to itself. With 0 every tensor
    has its own.
    """
    done: list[tuple[int, list[int]]] = []  # when a bucket's last gradient comes, and its indices
    filling: dict[Any, tuple[int, int, list[int]]] = {}  # bytes, when the last gradient came, indices
    for when, index in enumerate(order):
        tensor = tensors[index]
        key, size = (tensor.dtype, tensor.device), bytes_of(tensor)
        filled, last, indices = filling.get(key, (0, 0, []))
        if indices and (not limit or filled + size > limit):
            done.append((last, indices))
            filled, indices = 0, []
        filling[key] = (filled + size, when, [*indices, index])
    done.extend((last, indices) for _, last, indices in filling.values())
    return [indices for _, indices in sorted(done)]


def broadcast_together(tensors: Sequence[Tensor], group: Group, source: int = 0) -> None:
    """Copy parameters or buffers from one of the group's ranks to all, in place.

    It sends as many bytes as `comm.broadcast` of all the tensors, in messages of up to 25 MB.
    """
    together(tensors, lambda flat: comm.broadcast(flat, source=source, group=group))


def together(tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
    """Call `send`, which changes a tensor in place, on the tensors joined to flat ones of up to 25 MB."""
    with torch.no_grad():
        for indices in cut(tensors, range(len(tensors)), TOGETHER_BYTES):
            chosen = [tensors[index] for index in indices]
            if len(chosen) == 1:
                send(chosen[0])
                continue
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in chosen])
            send(flat)
            for tensor, values in zip(chosen, Bucket.over(flat, tensors, indices).views, strict=True):
                tensor.copy_(values)


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
