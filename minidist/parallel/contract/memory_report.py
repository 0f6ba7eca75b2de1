"""Where a rank's memory goes: bytes of parameters, gradients, optimizer state, activations and buffers.

Bytes are those of the tensors' storages and not the process's size, which holds the interpreter, libraries
and what an allocator keeps for later. A storage counts whole, since a view keeps all of it; and it counts
once: views, tied parameters, and a gradient that lies in a bucket add nothing.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 3, for what the parts are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from torch import Tensor, nn

from minidist.parallel.contract.strategy import ResidentTensors
from minidist.parallel.training.activation_memory import ActivationCounter

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by what they are for; printed, a small table."""

    parameters: int  # what the model computes with
    gradients: int  # and the buckets in which they are exchanged
    optimizer: int  # its state, and the float32 copies of half-precision parameters
    activations: int  # what the forward pass saves for the backward pass, at its peak
    buffers: int  # of the model, such as a BatchNorm's statistics

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def states(self) -> int:
        """All but the activations: what is there whatever the batch."""
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


def count(held: ResidentTensors, activations: int = 0) -> Memory:
    """The bytes of what a strategy holds.

    A storage that serves two purposes counts for the first of parameters, gradients, optimizer and buffers.
    """
    seen = Storages()
    parts = {field.name: seen.add(getattr(held, field.name)) for field in fields(held)}
    return Memory(**parts, activations=activations)


class Storages:
    """A set of storages. What lies twice at one address is one, whatever tensors call it."""

    def __init__(self) -> None:
        self._placed: dict[Hashable, list[tuple[int, int]]] = {}  # for each device, ranges of addresses
        self._unplaced: dict[int, int] = {}  # bytes of those without an address, as on the meta device

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the tensors' storages that were not in the set; now they are."""
        before = self.bytes()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, length = storage.data_ptr(), storage.nbytes()
            if start:
                self._placed.setdefault(tensor.device, []).append((start, start + length))
            else:
                self._unplaced[storage._cdata] = length
        self._placed = {device: join(ranges) for device, ranges in self._placed.items()}
        return self.bytes() - before

    def bytes(self) -> int:
        """Of all of them."""
        placed = sum(stop - start for ranges in self._placed.values() for start, stop in ranges)
        return placed + sum(self._unplaced.values())


def join(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that cover the same numbers once, in order: arrays of one buffer may overlap in part."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


class ActivationPeaks:
    """The peak of a model's activations in each step, counted once for each shape of its batches.

    Counting takes some microseconds for each saved tensor; so it is done in the first step with a shape, and
    later steps with that shape are taken to save as much. The batch itself is the caller's and not counted.

    Attributes:
        last: bytes, of the last step; 0 before the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._peaks, self.last = model, dict[Hashable, int](), 0

    @contextmanager
    def during(self, inputs: Tensor, targets: Tensor) -> Iterator[None]:
        """Around the forward and backward passes of a step on this batch."""
        shapes = inputs.shape, inputs.dtype, targets.shape, targets.dtype, self._model.training
        if shapes in self._peaks:
            yield
        else:
            with ActivationCounter(self._model, (inputs, targets)) as counter:
                yield
            self._peaks[shapes] = counter.peak
        self.last = self._peaks[shapes]
