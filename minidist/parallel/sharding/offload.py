"""Offload: shards, gradients and optimizer state in CPU memory, or in files that are mapped into memory.

When memory runs short, the system writes a mapped file's pages back and reads them again when they are
touched: data that does not fit costs the disk's time, and nothing else changes. An optimizer steps on slices,
one after the other. In memory stay the gathered parameters, two units' gradients while they are reduced, and
what the optimizer makes for one slice: state, before it moves to disk, and intermediate values.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

SLICE = 2**26
"""Bytes of parameters that an optimizer steps on at a time if they lie on disk."""


class StorageLocation:
    """Where shards, gradients and optimizer state lie; this one: on the device where the module computes."""

    longest: int | None = None  # the most bytes in a tensor that the optimizer gets; None for any number

    def empty_for(self, device: torch.device) -> Callable[[int, torch.dtype], Tensor] | None:
        """The function that makes the long tensors; None for memory that the ranks share."""
        return None

    def like(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros for optimizer state of the length of `x`."""
        return torch.zeros_like(x, dtype=dtype)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step."""
        optimizer.step()


class OnCPU(StorageLocation):
    """CPU memory, pinned if a GPU computes."""

    def empty_for(self, device: torch.device) -> Callable[[int, torch.dtype], Tensor] | None:
        """Pinned memory; None if the module computes on the CPU, where its shards are anyway."""
        if device.type == "cpu":
            return None
        return lambda length, dtype: torch.zeros(length, dtype=dtype, pin_memory=True)


class OnDisk(StorageLocation):
    """Files in a directory, mapped into memory. They have lost their names, and end with the process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.longest = directory, SLICE
        self._mapped: set[int] = set()  # addresses of storages
        self.empty(1, torch.uint8)  # an error now, and not in the first step

    def empty_for(self, device: torch.device) -> Callable[[int, torch.dtype], Tensor] | None:
        """Tensors in files."""
        return self.empty

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in a file of its own."""
        size = max(1, length) * dtype.itemsize
        try:
            descriptor, name = tempfile.mkstemp(prefix="minidist-offload-", dir=self.directory)
            try:
                # Reserve all of it now: a full disk is an error here, but a fatal signal at a later write.
                os.posix_fallocate(descriptor, 0, size)
                storage = torch.UntypedStorage.from_file(name, True, size)
            finally:
                os.close(descriptor)
                os.unlink(name)
        except OSError as error:
            raise OSError(
                error.errno,
                f"offload to {self.directory} needs a file of {size} bytes there, and the system says "
                f"{error.strerror!r}; give a directory with room that this process may write to",
            ) from error
        self._mapped.add(storage.data_ptr())
        return torch.empty(0, dtype=dtype).set_(storage, 0, (length,))  # type: ignore[call-overload, no-any-return]

    def like(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros for optimizer state, in a file."""
        return self.empty(len(x), dtype)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, slice by slice; state that it makes moves to disk."""
        whole = [group["params"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group["params"] = []
            for group, pieces in zip(optimizer.param_groups, whole, strict=True):
                for piece in pieces:
                    if piece.grad is not None:
                        group["params"] = [piece]
                        optimizer.step()
                        self._move(optimizer, piece)
                group["params"] = []
        finally:
            for group, pieces in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = pieces

    def _move(self, optimizer: torch.optim.Optimizer, piece: Tensor) -> None:
        state = optimizer.state[piece]
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != piece.shape:
                continue
            if value.untyped_storage().data_ptr() not in self._mapped:
                state[key] = self.empty(value.numel(), value.dtype).copy_(value)


def location_for(offload: bool | str | os.PathLike[str]) -> StorageLocation:
    """The location that `offload=` asks for; OSError where no file can be made there."""
    if offload is False:
        return StorageLocation()
    if isinstance(offload, bool) or not isinstance(offload, str | os.PathLike):
        raise TypeError(f"offload is {offload!r}; give False, 'cpu' or a directory")
    return OnCPU() if offload == "cpu" else OnDisk(Path(offload))
