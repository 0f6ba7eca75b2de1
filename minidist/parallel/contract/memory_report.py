"""Where a rank's memory goes: bytes of parameters, gradients, optimizer state, activations and buffers.

The bytes are those of tensor storages. The process is larger: it also holds the interpreter, libraries and
what an allocator keeps for later. A storage counts whole, because a view keeps all of it alive. It counts
once: views, tied parameters and a gradient inside a bucket add nothing.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 3, for the parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the estimate of memory is a formula, and runs without torch
    from torch import Tensor

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, eq=False)
class ResidentTensors:
    """The tensors that a rank keeps between steps, by purpose."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    optimizer: Sequence[Tensor]
    buffers: Sequence[Tensor]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by purpose; prints as a small table."""

    parameters: int  # in the dtype that the model computes with
    gradients: int  # and the buckets in which they are exchanged
    optimizer: int  # its state, and the float32 copies of half-precision parameters
    activations: int  # saved by the forward pass for the backward pass, at the peak
    buffers: int  # of the model, such as a BatchNorm's statistics

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def states(self) -> int:
        """All but the activations: the bytes that do not depend on the batch."""
        return self.total - self.activations

    def __str__(self) -> str:
        """A line for each part: its name, its bytes in a unit that fits, its share."""
        lines = [(part, getattr(self, part)) for part in PARTS] + [("total", self.total)]
        whole = max(self.total, 1)
        return "\n".join(f"{part:<11} {size(n):>9} {n / whole:>6.1%}" for part, n in lines)


def size(count: float, digits: int = 3) -> str:
    """A number of bytes with a few digits and a decimal unit, as papers give them: "17.5 MB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= (1 - 0.5 * 10**-digits) * scale:
            exponent = int(f"{count / scale:.{digits - 1}e}".partition("e")[2])  # once it is rounded
            return f"{count / scale:.{max(digits - 1 - exponent, 0)}f} {unit}"
    return f"{count:.0f} B"


def memory_of(held: ResidentTensors, activations: int = 0) -> Memory:
    """The bytes of the tensors that a strategy holds.

    A storage with two purposes counts for the first of parameters, gradients, optimizer and buffers.
    """
    seen = Storages()
    parts = {field.name: seen.add(getattr(held, field.name)) for field in fields(held)}
    return Memory(**parts, activations=activations)


class Storages:
    """A set of storages, told apart by their addresses."""

    def __init__(self) -> None:
        self._placed: dict[Hashable, list[tuple[int, int]]] = {}  # for each device, ranges of addresses
        self._unplaced: dict[int, int] = {}  # bytes of those without an address, as on the meta device

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Add the tensors' storages; returns the bytes of those that were not in the set."""
        before = self.bytes()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, length = storage.data_ptr(), storage.nbytes()
            if start:
                self._placed.setdefault(tensor.device, []).append((start, start + length))
            else:
                self._unplaced[storage._cdata] = length
        self._placed = {device: merge_ranges(ranges) for device, ranges in self._placed.items()}
        return self.bytes() - before

    def bytes(self) -> int:
        """The bytes of all storages in the set."""
        placed = sum(stop - start for ranges in self._placed.values() for start, stop in ranges)
        return placed + sum(self._unplaced.values())


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that overlap, as arrays of one buffer may; the result is in order."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined
