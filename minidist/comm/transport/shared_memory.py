"""The ranks of a group that share a host, and the memory through which they talk.

Per rank there is a header, in which it writes what it is about to do, a pair of semaphores to meet the
others at (`semaphores.py`), and three staging buffers for tensors that lie in no shared memory. Every
collective begins with a meeting after which each rank reads all headers: ranks that make different calls
learn it at once, and all of them. `shared_collectives.py` has the collectives.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minidist.comm.transport import segments, semaphores
from minidist.comm.transport.hosts import by_host, processes

STAGE = 2**20
"""Bytes of a staging buffer. Those of all ranks together are to stay in the last-level cache."""
BUFFERS = 3
"""Staging buffers of a rank: one is filled, one reduced and one emptied, by ranks that are a step apart."""

_HEADER = struct.Struct("<3q104s")  # segment, first byte there, number of sizes; the call in words
_numbers = itertools.count(1)


class Failed(RuntimeError):
    """A collective could not be completed through shared memory; the door makes a sentence of it."""


@dataclass(frozen=True)
class Header:
    """What a member is about to do."""

    segment: int  # that its tensor lies in; 0 where that is no shared memory
    offset: int  # of the tensor there, bytes
    sizes: tuple[int, ...]  # in an all-to-all: of what goes to each member, then of what comes from each


class SharedMemory:
    """This rank's end of the memory that a group's ranks on one host share. Made by all ranks together.

    Attributes:
        hosts: the group's ranks, host by host.
        members: of these the ranks on this host.
        own: this rank's place among the members.

    Raises:
        Failed: on all ranks, where one of them cannot map the memory.
    """

    def __init__(self, group: dist.ProcessGroup, limit: float) -> None:
        if not semaphores.available():
            raise Failed("this system has no memory and semaphores that processes can share")
        rank, everyone = dist.get_rank(group), processes(group)
        self.group, self.limit = group, limit
        self.hosts = by_host(everyone)
        self.members = next(host for host in self.hosts if rank in host)
        self.own, ranks = self.members.index(rank), len(self.members)
        self.number = next(_numbers)
        self._peers = [everyone[member] for member in self.members]
        self._segments = itertools.count(1)
        self._broken = ""
        self._calls = self._turn = 0

        control = semaphores.Meeting.size(ranks) + 2 * ranks * _header_size(ranks)
        pitch = segments.padded(BUFFERS * STAGE + control)  # the leader's region holds what is common
        descriptor = segments.share(group, self.hosts, pitch)
        if descriptor is None:
            raise Failed("the ranks cannot map common memory: too little is left, or it is not allowed")
        self._memory = segments.mapped(descriptor, ranks, pitch)
        common = memoryview(self._memory)[BUFFERS * STAGE : BUFFERS * STAGE + control]
        if self.own == 0:
            semaphores.Meeting.prepare(common, ranks)
        dist.barrier(group)
        patient = ranks > len(os.sched_getaffinity(0))
        self._meeting = semaphores.Meeting(common, self.own, ranks, patient)
        self._headers = common[semaphores.Meeting.size(ranks) :]
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    # Calls

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a collective inside; after one that failed halfway there can be no other.

        Raises:
            Failed: a peer is gone, late, or makes another call; or an earlier call failed.
        """
        if self._broken:
            raise Failed(f"an earlier call on these ranks failed, and left them out of step: {self._broken}")
        try:
            yield
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise

    def agree(self, what: str, segment: int = 0, offset: int = 0, sizes: Sequence[int] = ()) -> list[Header]:
        """Meet the others, and compare what each is about to do.

        Args:
            what: the call, in words that are the same on all ranks.
            segment, offset, sizes: this rank's header.

        Returns:
            The members' headers.

        Raises:
            Failed: they differ in what they do.
        """
        text = what.encode()[:104]
        self._calls += 1
        parity = self._calls % 2  # a fast rank may write its next header before a slow one has read this
        at = self._header(self.own, parity)
        _HEADER.pack_into(self._headers, at, segment, offset, len(sizes), text)
        struct.pack_into(f"<{len(sizes)}q", self._headers, at + _HEADER.size, *sizes)
        self.meet()
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

    def meet(self) -> None:
        """Wait for the other members.

        Raises:
            Failed: one of them has ended, or does not come within the limit.
        """
        try:
            self._meeting.meet(self.limit, self._look_after)
        except TimeoutError as error:
            raise Failed(str(error)) from None

    def name(self, member: int) -> int:
        """Return the rank in the world of the member at a place."""
        return dist.get_global_rank(self.group, self.members[member])

    # Memory

    def next_buffer(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the members' next staging buffers: (STAGE // itemsize,) each."""
        if dtype not in self._typed:
            with torch.inference_mode(False):  # what is made in that mode cannot be written to outside it
                self._typed[dtype] = [
                    [
                        self._memory.region(member, buffer * STAGE, STAGE).view(dtype)
                        for member in range(len(self.members))
                    ]
                    for buffer in range(BUFFERS)
                ]
        self._turn += 1
        return self._typed[dtype][self._turn % BUFFERS]

    def place_of(self, x: torch.Tensor) -> tuple[int, int]:
        """Return the number of the segment that a tensor lies in, and its first byte there; or 0, 0."""
        segment = segments.find(x)
        if segment is None or segment.owner != self.number:
            return 0, 0
        return segment.number, _start(x)

    def everyones(self, x: torch.Tensor, length: int | None = None) -> list[torch.Tensor]:
        """Return the members' counterparts of a flat tensor that `place_of` found, of `length` elements."""
        segment = segments.find(x)
        assert segment is not None
        start, size = _start(x), (len(x) if length is None else length) * x.element_size()
        if not size:
            return [x[:0]] * len(self.members)
        return [segment.region(member, start, size).view(x.dtype) for member in range(len(self.members))]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Make a tensor of which each member has its own, zeros, in one segment. A collective.

        Returns:
            The tensor; None on all ranks where it would be empty or there is not enough memory.
        """
        pitch = segments.padded(torch.Size(shape).numel() * dtype.itemsize)
        descriptor = segments.share(self.group, self.hosts, pitch) if pitch else None
        if descriptor is None:
            return None
        segment = segments.mapped(descriptor, len(self.members), pitch)
        segment.number, segment.owner = next(self._segments), self.number
        return segments.tensor_in(segment, self.own, shape, dtype)

    def _look_after(self, late: Callable[[], list[int]]) -> None:
        """Raise where one of those who have not come never will."""
        for member in late():
            # Asked again once it has ended: it may have come, and then ended at once.
            if not self._peers[member].alive() and member in late():
                raise Failed(f"connection closed by peer: the process of rank {self.name(member)} has ended")

    def _header(self, member: int, parity: int) -> int:
        return (2 * member + parity) * _header_size(len(self.members))


def _start(x: torch.Tensor) -> int:
    """Return a tensor's first byte in its storage."""
    return int(x.storage_offset()) * x.element_size()


def _header_size(ranks: int) -> int:
    return _HEADER.size + 2 * 8 * ranks
