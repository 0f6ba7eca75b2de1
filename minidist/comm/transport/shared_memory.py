"""`SharedMemory`: the memory through which the ranks of a group on one host talk.

For each rank it has a header, in which the rank writes what it is about to do, a pair of semaphores for
barriers (`semaphores.py`), and three staging buffers for tensors that lie outside shared memory. Every
collective begins with a barrier, after which each rank reads all headers: if ranks make different calls, all
of them learn it at once. `shared_collectives.py` has the collectives.
"""

from __future__ import annotations

import itertools
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from minidist.comm import returned_ranks
from minidist.comm.transport import segments, semaphores
from minidist.comm.transport.background_thread import Failed as Failed
from minidist.comm.transport.background_thread import InStep
from minidist.comm.transport.hosts import by_host, processes

STAGE = 2**20
"""Bytes of a staging buffer. The buffers of all ranks should fit into the last-level cache."""
BUFFERS = 3
"""Staging buffers of a rank. Ranks may be a step apart: one fills, one reduces, one empties a buffer."""

_HEADER = struct.Struct("<3q104s")  # segment, first byte there, number of sizes; the call in words
_numbers = itertools.count(1)


class Header(NamedTuple):
    """A rank's announcement of what it is about to do."""

    segment: int  # number of the segment with its tensor; 0 if that is not in shared memory
    offset: int  # bytes before the tensor there
    sizes: tuple[int, ...]  # in an all-to-all: elements to each member, then elements from each


class SharedMemory(InStep):
    """The memory that a group's ranks on one host share. All ranks make it together.

    If one of them cannot map the memory, `Failed` is raised on all.
    """

    def __init__(self, group: dist.ProcessGroup, limit: float) -> None:
        super().__init__()
        if not semaphores.available():
            raise Failed("this system has no memory and semaphores that processes can share")
        rank, everyone = dist.get_rank(group), processes(group)
        self._group, self.limit = weakref.ref(group), limit  # a group that is destroyed takes this with it
        self.hosts = by_host(everyone)  # the group's ranks, host by host
        self.members = next(host for host in self.hosts if rank in host)  # the ranks on this host
        # A member is named by its index in `members`.
        self.own, ranks = self.members.index(rank), len(self.members)
        self._names = [dist.get_global_rank(group, member) for member in self.members]
        self.number = next(_numbers)
        self._peers = [everyone[member] for member in self.members]
        self._segments = itertools.count(1)
        self._calls = self._turn = 0

        control = semaphores.ProcessBarrier.size(ranks) + 2 * ranks * _header_size(ranks)
        # The first member's region also holds the control part.
        pitch = segments.padded(BUFFERS * STAGE + control)
        descriptor = segments.share(group, self.hosts, pitch)
        if descriptor is None:
            raise Failed("the ranks cannot map common memory: too little is left, or it is not allowed")
        self._memory = segments.mapped(descriptor, ranks, pitch)
        common = memoryview(self._memory)[BUFFERS * STAGE : BUFFERS * STAGE + control]
        if self.own == 0:
            semaphores.ProcessBarrier.prepare(common, ranks)
        dist.barrier(group)
        # The other groups' ranks on this host need cores as well.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        patient = here > len(os.sched_getaffinity(0))
        self._barrier = semaphores.ProcessBarrier(common, self.own, ranks, patient)
        self._headers = common[semaphores.ProcessBarrier.size(ranks) :]
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which makes all calls here and so is alive."""
        group = self._group()
        assert group is not None
        return group

    # Calls

    def agree(self, what: str, segment: int = 0, offset: int = 0, sizes: Sequence[int] = ()) -> list[Header]:
        """Wait for the other members, and return what each is about to do. Failed if their calls differ.

        what: describes the call, in the same words on all ranks. The rest is this rank's header.
        """
        text = what.encode()[:104]
        self._calls += 1
        parity = self._calls % 2  # a fast rank may write its next header before a slow one has read this one
        at = self._header(self.own, parity)
        _HEADER.pack_into(self._headers, at, segment, offset, len(sizes), text)
        struct.pack_into(f"<{len(sizes)}q", self._headers, at + _HEADER.size, *sizes)
        self.barrier()
        headers = []
        for member in range(len(self.members)):
            at = self._header(member, parity)
            segment, offset, count, other = _HEADER.unpack_from(self._headers, at)
            other = other.rstrip(b"\0")
            if other != text:
                raise Failed(
                    f"rank {self.name(self.own)} calls {what}, and rank {self.name(member)} calls "
                    f"{other.decode(errors='replace')}; all ranks of a group make the same calls in the same "
                    "order, with the same sizes and dtypes"
                )
            sizes = struct.unpack_from(f"<{count}q", self._headers, at + _HEADER.size)
            headers.append(Header(segment, offset, sizes))
        return headers

    def barrier(self) -> None:
        """Wait for the other members. Failed if one of them has ended, or does not come within the limit."""
        try:
            self._barrier.wait(self.limit, self._look_after)
        except TimeoutError as error:
            raise Failed(str(error)) from None

    def name(self, member: int) -> int:
        """Return a member's rank in the world."""
        return self._names[member]

    # Memory

    def next_buffer(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the members' next staging buffers: (STAGE // itemsize,) each."""
        if dtype not in self._typed:
            with torch.inference_mode(False):  # tensors made in that mode are read-only outside it
                self._typed[dtype] = [
                    [
                        self._memory.region(member, buffer * STAGE, STAGE).view(dtype)
                        for member in range(len(self.members))
                    ]
                    for buffer in range(BUFFERS)
                ]
        self._turn += 1
        return self._typed[dtype][self._turn % BUFFERS]

    def locate(self, x: torch.Tensor) -> tuple[int, int]:
        """Return a tensor's segment number and its first byte there; (0, 0) if it lies in no segment."""
        segment = segments.find(x)
        if segment is None or segment.owner != self.number:
            return 0, 0
        return segment.number, _start(x)

    def counterparts(self, x: torch.Tensor, length: int | None = None) -> list[torch.Tensor]:
        """Return the members' tensors at x's location. x is flat; `length` elements, by default x's.

        x must lie in a segment, as `locate` tells.
        """
        segment = segments.find(x)
        assert segment is not None
        start, size = _start(x), (len(x) if length is None else length) * x.element_size()
        if not size:
            return [x[:0]] * len(self.members)
        return [segment.region(member, start, size).view(x.dtype) for member in range(len(self.members))]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Make a segment with a tensor of zeros for each member, and return this rank's. A collective.

        None on all ranks if the tensor would be empty or memory is short.
        """
        pitch = segments.padded(torch.Size(shape).numel() * dtype.itemsize)
        descriptor = segments.share(self.group, self.hosts, pitch) if pitch else None
        if descriptor is None:
            return None
        segment = segments.mapped(descriptor, len(self.members), pitch)
        segment.number, segment.owner = next(self._segments), self.number
        return segments.tensor_in(segment, self.own, shape, dtype)

    def _look_after(self, late: Callable[[], list[int]]) -> None:
        """Raise if a member that is late has ended, or returned from its function."""
        for member in late():
            if not self._peers[member].alive():
                reason = "connection closed by peer: the process of rank {} has ended"
            else:
                reason = returned_ranks.why_absent(self.name(member))
            if reason and member in late():  # asked again: it may have come, and then ended
                raise Failed(reason.format(self.name(member)))

    def _header(self, member: int, parity: int) -> int:
        return (2 * member + parity) * _header_size(len(self.members))


def _start(x: torch.Tensor) -> int:
    """Return a tensor's first byte in its storage."""
    return int(x.storage_offset()) * x.element_size()


def _header_size(ranks: int) -> int:
    return _HEADER.size + 2 * 8 * ranks
