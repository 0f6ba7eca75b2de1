"""Segments: files in memory that the ranks of one host map, and tensors in them.

A segment has a region for each rank, and every rank maps all regions. Its file never has a name
(`memfd_create`): the other ranks open it through the descriptor of the rank that made it. So a rank that is
killed leaves nothing behind, and no mount's size limits the segment.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist


class Segment(mmap.mmap):
    """A mapping of all ranks' regions. It lives as long as any tensor in it."""

    pitch: int  # bytes from one region to the next
    number: int  # of the segment, above 0, the same on all its ranks
    owner: int  # number of the `SharedMemory` that it belongs to

    def region(self, rank: int, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes (at least 1) of a rank's region, from byte `start` on, as uint8."""
        return torch.frombuffer(self, dtype=torch.uint8, count=size, offset=rank * self.pitch + start)


_by_address: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
"""Segments by the address of this rank's region, which is the storage address of its tensors there."""


def share(group: dist.ProcessGroup, hosts: Sequence[Sequence[int]], pitch: int) -> int | None:
    """Make a file of zeros on each host, `pitch` bytes a rank, and open it in all ranks there. A collective.

    hosts: the group's ranks, host by host. The ranks talk over gloo. Returns the descriptor of this host's
    file, or None on all ranks if any of them failed.
    """
    rank = dist.get_rank(group)
    members = next(host for host in hosts if rank in host)
    own = -1
    if rank == members[0]:
        own = created(pitch * len(members), [(0, pitch * len(members))])
    rows = [torch.empty(2, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor([os.getpid(), own]), group=group)
    if rank != members[0]:
        process, descriptor = rows[members[0]].tolist()
        own = _opened(process, descriptor)
    worst = torch.tensor(own)
    dist.all_reduce(worst, dist.ReduceOp.MIN, group=group)  # also keeps the maker from closing it too early
    if worst >= 0:
        return own
    if own >= 0:
        os.close(own)
    return None


def created(size: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Make a file of zeros, with memory for these ranges (start, length); -1 if that fails."""
    if not hasattr(os, "memfd_create"):  # not Linux
        return -1
    descriptor = os.memfd_create("minidist")
    try:
        os.ftruncate(descriptor, size)
        for start, length in ranges:
            # A write without memory behind it would kill the process; this raises an error at once.
            os.posix_fallocate(descriptor, start, length)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _opened(process: int, descriptor: int) -> int:
    """Open the file behind another process's descriptor; -1 if that fails."""
    try:
        return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR) if descriptor >= 0 else -1
    except OSError:
        return -1


def mapped(descriptor: int, ranks: int, pitch: int) -> Segment:
    """Map a file of `ranks` regions and close its descriptor."""
    try:
        segment = Segment(descriptor, ranks * pitch, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    segment.pitch, segment.number, segment.owner = pitch, 0, 0
    return segment


def tensor_in(segment: Segment, own: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor at the start of this rank's region; `find` then knows it and its slices."""
    size = torch.Size(shape).numel() * dtype.itemsize
    x = segment.region(own, 0, size).view(dtype).view(shape)
    _by_address[x.untyped_storage().data_ptr()] = segment
    return x


def find(x: torch.Tensor) -> Segment | None:
    """Return the segment in which a tensor of this rank lies, if any."""
    return _by_address.get(x.untyped_storage().data_ptr()) if _by_address else None


def padded(size: int) -> int:
    """Round a number of bytes up to whole pages, on which every region begins."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
