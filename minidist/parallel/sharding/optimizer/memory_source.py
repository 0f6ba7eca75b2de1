"""Where a rank's shards, gradients and optimizer state lie: on the device, in CPU memory, or in mapped files.

When memory runs short, the system writes a mapped file's pages back and reads them again when they are
touched: data that does not fit costs the disk's time, and nothing else changes. An optimizer steps on slices,
one after the other. In memory stay the gathered parameters, two units' gradients while they are reduced, and
what the optimizer makes for one slice: state, before it moves to disk, and intermediate values.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from minidist.parallel.flat.gradients import GradientComm

SLICE = 2**26
"""Bytes of parameters that an optimizer steps on at a time if they lie on disk."""


class MemorySource:
    """Where shards, gradients and optimizer state lie; this one: on the device where the module computes."""

    longest: int | None = None  # the most bytes in a tensor that the optimizer gets; None for any number

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros for gradients, masters or state of a module that computes on `device`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def shards(
        self, numel: int, dtype: torch.dtype, device: torch.device, gradient_comm: GradientComm
    ) -> Tensor:
        """Zeros for shards. A collective: an all-gather copies memory that the ranks share only once."""
        return gradient_comm.zeros(numel, dtype, device)

    def copy(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `x` in another dtype."""
        return x.to(dtype, copy=True)

    def keep(self, x: Tensor) -> Tensor:
        """A new tensor that is to be kept, in memory of this kind."""
        return x


class OnCPU(MemorySource):
    """CPU memory, pinned if a GPU computes."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in CPU memory."""
        return torch.zeros(numel, dtype=dtype, pin_memory=device.type != "cpu")

    def shards(
        self, numel: int, dtype: torch.dtype, device: torch.device, gradient_comm: GradientComm
    ) -> Tensor:
        """Pinned memory; shared memory if the module computes on the CPU, where its shards are anyway."""
        if device.type == "cpu":
            return gradient_comm.zeros(numel, dtype, device)
        return self.zeros(numel, dtype, device)


class OnDisk(MemorySource):
    """Files in a directory, mapped into memory. They have lost their names, and end with the process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.longest = directory, SLICE
        self._mapped: set[int] = set()  # addresses of storages
        self.empty(1, torch.uint8)  # an error now, and not in the first step

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in a file of their own."""
        return self.empty(numel, dtype)

    def shards(
        self, numel: int, dtype: torch.dtype, device: torch.device, gradient_comm: GradientComm
    ) -> Tensor:
        """Zeros in a file."""
        return self.empty(numel, dtype)

    def copy(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy in a file."""
        return self.empty(x.numel(), dtype).view(x.shape).copy_(x)

    def keep(self, x: Tensor) -> Tensor:
        """A copy in a file, unless `x` lies in one."""
        if x.untyped_storage().data_ptr() in self._mapped:
            return x
        return self.copy(x, x.dtype)

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


def memory_source(offload: bool | str | os.PathLike[str]) -> MemorySource:
    """The source that `offload=` asks for; OSError where no file can be made there."""
    if offload == "":
        raise ValueError("offload is '', which names no directory; give False, 'cpu' or a directory")
    if offload is False:
        return MemorySource()
    if isinstance(offload, bool) or not isinstance(offload, str | os.PathLike):
        raise TypeError(f"offload is {offload!r}; give False, 'cpu' or a directory")
    return OnCPU() if offload == "cpu" else OnDisk(Path(offload))
