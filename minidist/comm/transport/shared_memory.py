"""The memory of a group's ranks on one host, and the collectives in which they read each other's tensors.

For each rank the memory has a header, in which the rank writes what it is about to do, semaphores for
barriers (`ipc.py`), and three staging buffers. Every collective begins with a barrier, after which each rank
reads all headers: if ranks make different calls, all of them learn it at once.

Each of n ranks reduces its n-th of the tensor from all ranks' memory, and the others read the result from
there. This is the reduce-scatter and all-gather of a ring, and reads as many bytes from other ranks as a ring
sends, but in two steps in place of 2 (n - 1), and without copies through sockets. Tensors pass through a
core's cache in pieces, so that main memory is read once and written once.

Tensors outside shared memory (see `comm.empty_shared`) go through staging buffers in chunks. While chunk i is
reduced, chunk i + 1 is copied in. One barrier a chunk keeps the ranks closer together than three buffers
allow.

Source of the split: Patarasuk and Yuan 2009, section 3. The collectives take flat, contiguous tensors.
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
from torch import Tensor

from minidist.comm.algorithms.execute import COMBINE
from minidist.comm.errors import failed
from minidist.comm.transport import STAGE, ipc
from minidist.comm.transport.ipc import ProcessBarrier
from minidist.comm.work import Failed, Group, known, limit_of, process_group, ranks_of

BUFFERS = 3
"""Staging buffers of a rank. Ranks may be a step apart: one fills, one reduces, one empties a buffer."""
PIECE = 2**17
"""Bytes to reduce at once: the pieces of a few ranks fit into the L2 cache of a core."""

_HEADER = struct.Struct("<3q104s")  # segment, first byte there, number of sizes; the call in words
_numbers = itertools.count(1)


class Header(NamedTuple):
    """A rank's announcement of what it is about to do."""

    segment: int  # number of the segment with its tensor; 0 if that is not in shared memory
    offset: int  # bytes before the tensor there
    sizes: tuple[int, ...]  # in an all-to-all: elements to each member, then elements from each


class SharedMemory:
    """The memory that a group's ranks on one host share. All ranks make it together.

    If one of them cannot map the memory, `Failed` is raised on all.
    """

    def __init__(self, group: dist.ProcessGroup, limit: float) -> None:
        if not ipc.has_semaphores():
            raise Failed("this system has no memory and semaphores that processes can share")
        rank, everyone = dist.get_rank(group), ipc.processes(group)
        self._group, self.limit = weakref.ref(group), limit  # a group that is destroyed takes this with it
        self.hosts = ipc.by_host(everyone)  # the group's ranks, host by host
        self.members = next(each for each in self.hosts if rank in each)  # the ranks on this host
        # A member is named by its index in `members`.
        self.own, ranks = self.members.index(rank), len(self.members)
        self.names = [dist.get_global_rank(group, member) for member in self.members]  # as ranks of the world
        self.number = next(_numbers)
        self.peers = [everyone[member] for member in self.members]
        self._segments = itertools.count(1)
        self._calls = self._turn = 0

        control = ProcessBarrier.size(ranks) + 2 * ranks * _header_size(ranks)
        # The first member's region also holds the control part.
        pitch = ipc.padded(BUFFERS * STAGE + control)
        descriptor = ipc.share_file(group, self.hosts, pitch)
        if descriptor is None:
            raise Failed("the ranks cannot map common memory: too little is left, or it is not allowed")
        self._memory = ipc.map_segment(descriptor, ranks, pitch)
        common = memoryview(self._memory)[BUFFERS * STAGE : BUFFERS * STAGE + control]
        if self.own == 0:
            ProcessBarrier.prepare(common, ranks)
        dist.barrier(group)
        # The other groups' ranks on this host need cores as well.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        patient = here > len(os.sched_getaffinity(0))
        self.process_barrier = ProcessBarrier(common, self.own, ranks, patient)
        self._headers = common[ProcessBarrier.size(ranks) :]
        self._typed: dict[torch.dtype, list[list[Tensor]]] = {}

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
                    f"rank {self.names[self.own]} calls {what}, and rank {self.names[member]} calls "
                    f"{other.decode(errors='replace')}; all ranks of a group make the same calls in the same "
                    "order, with the same sizes and dtypes"
                )
            sizes = struct.unpack_from(f"<{count}q", self._headers, at + _HEADER.size)
            headers.append(Header(segment, offset, sizes))
        return headers

    def barrier(self) -> None:
        """Wait for the other members. Failed if one of them has ended, or does not come within the limit."""
        try:
            self.process_barrier.wait(self.limit, self.look_after)
        except TimeoutError as error:
            raise Failed(str(error)) from None

    def look_after(self, late: Callable[[], list[int]]) -> None:
        """Raise Failed if a member that is late has ended, or returned from its function."""
        for member in late():
            reason = ipc.why_gone(self.names[member], self.peers[member])
            if reason and member in late():  # asked again: it may have come, and then ended
                raise Failed(reason)

    def next_buffer(self, dtype: torch.dtype) -> list[Tensor]:
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

    def locate(self, x: Tensor) -> tuple[int, int]:
        """Return a tensor's segment number and its first byte there; (0, 0) if it lies in no segment."""
        segment = ipc.segment_of(x)
        if segment is None or segment.owner != self.number:
            return 0, 0
        return segment.number, _start(x)

    def counterparts(self, x: Tensor, length: int | None = None) -> list[Tensor]:
        """Return the members' tensors at x's location. x is flat; `length` elements, by default x's.

        x must lie in a segment, as `locate` tells.
        """
        segment = ipc.segment_of(x)
        assert segment is not None
        start, size = _start(x), (len(x) if length is None else length) * x.element_size()
        if not size:
            return [x[:0]] * len(self.members)
        return [segment.region(member, start, size).view(x.dtype) for member in range(len(self.members))]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Make a segment with a tensor of zeros for each member, and return this rank's. A collective.

        None on all ranks if the tensor would be empty or memory is short.
        """
        pitch = ipc.padded(torch.Size(shape).numel() * dtype.itemsize)
        group = self._group()
        assert group is not None  # it makes all calls here, and so is alive
        descriptor = ipc.share_file(group, self.hosts, pitch) if pitch else None
        if descriptor is None:
            return None
        segment = ipc.map_segment(descriptor, len(self.members), pitch)
        segment.number, segment.owner = next(self._segments), self.number
        return ipc.tensor_in(segment, self.own, shape, dtype)

    def _header(self, member: int, parity: int) -> int:
        return (2 * member + parity) * _header_size(len(self.members))


def _start(x: Tensor) -> int:
    """Return a tensor's first byte in its storage."""
    return int(x.storage_offset()) * x.element_size()


def _header_size(ranks: int) -> int:
    return _HEADER.size + 2 * 8 * ranks


# The memory of a group


class GroupMemory(NamedTuple):
    """The shared memory of a group."""

    memory: SharedMemory | None  # of the group's ranks on this host; None if they cannot share any
    why_not: str  # why the whole group cannot use it; empty if it can


def group_memory(group: Group, what: str = "a collective") -> GroupMemory:
    """Return a group's shared memory. The group's first call, `what` in errors, makes it: a collective."""
    record, group = known(group), process_group(group)
    if record.memory is None:
        memory, why_not = None, ""
        try:
            # The group of a dry run, which only counts bytes, brings its own.
            own = getattr(group, "shared_memory", None)
            memory = SharedMemory(group, limit_of(group)) if own is None else own()
        except Failed as error:
            why_not = str(error)
        except RuntimeError as error:
            raise failed(what, ranks_of(group), error) from error
        if memory is not None and len(memory.hosts) > 1:
            why_not = f"the ranks are on {len(memory.hosts)} hosts"
        record.memory = GroupMemory(memory, why_not)
    found: GroupMemory = record.memory
    return found


def empty_shared(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, group: Group = None
) -> torch.Tensor:
    """Make a tensor of zeros that collectives read and write in place. A collective.

    It lies in memory that all CPU ranks of this host map. Collectives of the group on it, or on contiguous
    slices that begin at the same offset on all ranks, need no copies through buffers. After a collective its
    values belong to this rank: no other rank changes them before the next one. The memory is freed with the
    last tensor in it. Where ranks can't share memory, it is an ordinary tensor.

    Args:
        shape: the same on all ranks.
        dtype: the same on all ranks.
        group: whose ranks share it; None for all.

    Raises:
        CollectiveError: a peer is gone or late.
    """
    size = tuple(shape)
    memory = group_memory(group).memory if len(ranks_of(group)) > 1 else None
    try:
        shared = memory.empty(size, dtype) if memory is not None else None
    except RuntimeError as error:
        raise failed("empty_shared", ranks_of(group), error) from error
    return torch.zeros(size, dtype=dtype) if shared is None else shared


# Collectives

Fill = Callable[[int], list[Tensor]]
"""Puts this rank's chunk i, if there is one, into the next staging buffers, and returns the buffers."""


def all_reduce(memory: SharedMemory, x: Tensor, op: str) -> None:
    """Reduce x over the members, in place. All of them get the same bits."""
    chunk = STAGE // x.element_size()
    fill = _filler(memory, x, [x], chunk)
    buffer = _begin(memory, f"all_reduce ({op}) of {_words(x)}", x, fill)
    if buffer is None:
        everywhere = memory.counterparts(x)
        _reduce(memory, everywhere, everywhere, op)
        memory.barrier()
        return
    for i in range(-(-len(x) // chunk)):
        part = x[i * chunk : (i + 1) * chunk]
        staged = [each[: len(part)] for each in buffer]
        _reduce(memory, staged, staged[:1], op)
        buffer = fill(i + 1)
        memory.barrier()
        part.copy_(staged[0])


def reduce_scatter(memory: SharedMemory, x: Tensor, out: Tensor, op: str, offsets: Sequence[int]) -> None:
    """Reduce x over the members, and put this rank's shard, x[offsets[own] : offsets[own + 1]], into out.

    out may be that part of x.
    """
    own = memory.own
    parts = [x[low:high] for low, high in itertools.pairwise(offsets)]
    chunk = STAGE // len(memory.members) // x.element_size()
    rounds, fill = -(-max(map(len, parts)) // chunk), _filler(memory, x, parts, chunk)
    buffer = _begin(memory, f"reduce_scatter ({op}) of {_words(x)}", x, fill)
    if buffer is None:
        shards = [part[offsets[own] : offsets[own + 1]] for part in memory.counterparts(x)]
        if shards[own].data_ptr() == out.data_ptr():  # out is read before it is overwritten
            shards[0], shards[own] = shards[own], shards[0]
        _combine(shards, [out], op)
        memory.barrier()  # after it x may change
        return
    for i in range(rounds):
        shard = out[i * chunk : (i + 1) * chunk]
        staged, buffer = [part[own * chunk :][: len(shard)] for part in buffer], fill(i + 1)
        _combine(staged, [shard], op)
        if i + 1 < rounds:
            memory.barrier()


def all_gather(memory: SharedMemory, x: Tensor, out: Tensor, offsets: Sequence[int]) -> None:
    """Put each member m's x into out[offsets[m] : offsets[m + 1]]. x may be this rank's part of out."""
    parts = [out[low:high] for low, high in itertools.pairwise(offsets)]
    if parts[memory.own].data_ptr() != x.data_ptr():
        parts[memory.own].copy_(x)
    others = [(member, part) for member, part in enumerate(parts) if member != memory.own]
    equal = len({*map(len, parts)}) == 1  # else members differ in x, and agree in out
    _spread(memory, f"all_gather of {_words(x if equal else out)}", x, max(map(len, parts)), others)


def broadcast(memory: SharedMemory, x: Tensor, source: int) -> None:
    """Copy x from member `source` to all."""
    here = memory.own == source
    what = f"broadcast from rank {memory.names[source]} of {_words(x)}"
    _spread(memory, what, x, len(x), [] if here else [(source, x)], gives=here)


def _spread(
    memory: SharedMemory,
    what: str,
    x: Tensor,
    longest: int,
    copies: Sequence[tuple[int, Tensor]],
    gives: bool = True,
) -> None:
    """Copy members' tensors: `copies` lists each member to read from, and where to.

    longest: elements of the longest member's x. gives: whether this rank's x is read by others.
    """
    chunk = STAGE // x.element_size()
    rounds, fill = -(-longest // chunk), _filler(memory, x, [x] if gives else [], chunk)
    buffer = _begin(memory, what, x, fill)
    if buffer is None:
        for member, into in copies:
            into.copy_(memory.counterparts(x, len(into))[member])
        memory.barrier()  # after it x may change
        return
    for i in range(rounds):
        staged, buffer = buffer, fill(i + 1)
        for member, into in copies:
            piece = into[i * chunk : (i + 1) * chunk]
            piece.copy_(staged[member][: len(piece)])
        if i + 1 < rounds:
            memory.barrier()


def all_to_all(
    memory: SharedMemory, x: Tensor, out: Tensor, sends: Sequence[int], receives: Sequence[int]
) -> None:
    """Exchange parts: x holds sends[m] elements for each member m, and out gets receives[m] from each."""
    n, own = len(memory.members), memory.own
    chunk = STAGE // n // x.element_size()
    fill = _filler(memory, x, x.split_with_sizes(list(sends)), chunk)
    parts = out.split_with_sizes(list(receives))
    buffer = fill(0)
    headers = memory.agree(f"all_to_all of {x.dtype}", sizes=(*sends, *receives))
    for a, sender in enumerate(headers):
        for b, receiver in enumerate(headers):
            if sender.sizes[b] != receiver.sizes[n + a]:
                raise Failed(
                    f"all_to_all: rank {memory.names[a]} sends {sender.sizes[b]} elements to rank "
                    f"{memory.names[b]}, which expects {receiver.sizes[n + a]}; give it "
                    "output_rows that match"
                )
    rounds = -(-max(max(header.sizes) for header in headers) // chunk)
    for i in range(rounds):
        staged, buffer = buffer, fill(i + 1)
        for member, part in zip(staged, parts, strict=True):
            piece = part[i * chunk : (i + 1) * chunk]
            piece.copy_(member[own * chunk : own * chunk + len(piece)])
        if i + 1 < rounds:
            memory.barrier()


def barrier(memory: SharedMemory) -> None:
    """Wait for the other members."""
    memory.agree("barrier")


def _begin(memory: SharedMemory, what: str, x: Tensor, fill: Fill) -> list[Tensor] | None:
    """Agree on a call. Returns None if every x can be read in place, else the buffers with every chunk 0."""
    segment, offset = memory.locate(x)
    buffer = None if segment else fill(0)
    headers = memory.agree(what, segment, offset)
    if segment and all((header.segment, header.offset) == (segment, offset) for header in headers):
        return None
    if any(header.segment for header in headers):  # those members have not filled their buffers
        buffer = fill(0) if buffer is None else buffer
        memory.barrier()
    return buffer


def _filler(memory: SharedMemory, x: Tensor, parts: Sequence[Tensor], chunk: int) -> Fill:
    """Return the function that fills this rank's buffer with chunk i of each part of x, side by side."""

    def fill(i: int) -> list[Tensor]:
        buffer = memory.next_buffer(x.dtype)
        for m, part in enumerate(parts):
            piece = part[i * chunk : (i + 1) * chunk]
            buffer[memory.own][m * chunk : m * chunk + len(piece)].copy_(piece)
        return buffer

    return fill


def _reduce(memory: SharedMemory, sources: Sequence[Tensor], targets: Sequence[Tensor], op: str) -> None:
    """Combine this rank's n-th of the sources into the same n-th of the targets."""
    length, n = sources[0].numel(), len(memory.members)
    own = slice(memory.own * length // n, (memory.own + 1) * length // n)
    _combine([part[own] for part in sources], [part[own] for part in targets], op)


def _combine(sources: Sequence[Tensor], targets: Sequence[Tensor], op: str) -> None:
    """Combine the sources, in order, into all targets.

    The targets may be the sources, or only the first source, or share no memory with them.
    """
    combine = COMBINE["sum" if op == "mean" else op]
    size = max(1, PIECE // sources[0].element_size())
    for start in range(0, sources[0].numel(), size):
        first, second, *others = (source[start : start + size] for source in sources)
        result, *copies = (target[start : start + size] for target in targets)
        combine(first, second, out=result)
        for piece in others:
            combine(result, piece, out=result)
        if op == "mean":
            result.div_(len(sources))
        for copy in copies:
            copy.copy_(result)


def _words(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}[{x.numel()}]"
