"""Collectives in shared memory: ranks of one host read each other's tensors in place.

Each of n ranks reduces its n-th of the tensor from all ranks' memory, and the others read the result from
there. This is the reduce-scatter and all-gather of a ring, and reads as many bytes from other ranks as a ring
sends, but in two steps in place of 2 (n - 1), and without copies through sockets. Tensors pass through a
core's cache in pieces, so that main memory is read once and written once.

Tensors outside shared memory (see `comm.empty_shared`) go through staging buffers in chunks. While chunk i is
reduced, chunk i + 1 is copied in. One barrier a chunk keeps the ranks closer together than three buffers
allow.

Source of the split: Patarasuk and Yuan 2009, section 3. The functions take flat, contiguous tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from minidist.comm.algorithms.execute import COMBINE
from minidist.comm.transport.shared_memory import STAGE, Failed, SharedMemory

PIECE = 2**17
"""Bytes to reduce at once: the pieces of a few ranks fit into the L2 cache of a core."""

Fill = Callable[[int], list[Tensor]]
"""Puts this rank's chunk i, if there is one, into the next staging buffers, and returns the buffers."""


def all_reduce(memory: SharedMemory, x: Tensor, op: str) -> None:
    """Reduce x over the members, in place. All of them get the same bits."""
    with memory.call():
        fill, rounds = _by_chunks(memory, x, x.numel())
        buffer = _begin(memory, f"all_reduce ({op}) of {_words(x)}", x, fill)
        if buffer is None:
            everywhere = memory.counterparts(x)
            _reduce(memory, everywhere, everywhere, op)
            memory.barrier()
            return
        for i in range(rounds):
            chunk = _chunk(x, i)
            staged = [part[: chunk.numel()] for part in buffer]
            _reduce(memory, staged, staged[:1], op)
            buffer = fill(i + 1)
            memory.barrier()
            chunk.copy_(staged[0])


def reduce_scatter(memory: SharedMemory, x: Tensor, out: Tensor, op: str, offsets: Sequence[int]) -> None:
    """Reduce x over the members, and put this rank's share, x[offsets[own] : offsets[own + 1]], into out.

    out may be that part of x.
    """
    n, own = len(memory.members), memory.own
    with memory.call():
        parts = [x[low:high] for low, high in itertools.pairwise(offsets)]
        chunk = STAGE // n // x.element_size()
        rounds, fill = -(-max(map(len, parts)) // chunk), _by_parts(memory, parts, chunk)
        buffer = _begin(memory, f"reduce_scatter ({op}) of {_words(x)}", x, fill)
        if buffer is None:
            shares = [part[offsets[own] : offsets[own + 1]] for part in memory.counterparts(x)]
            if shares[own].data_ptr() == out.data_ptr():  # out is read before it is overwritten
                shares[0], shares[own] = shares[own], shares[0]
            _combine(shares, [out], op)
            memory.barrier()  # after it x may change
            return
        for i in range(rounds):
            share = out[i * chunk : (i + 1) * chunk]
            staged, buffer = [part[own * chunk :][: len(share)] for part in buffer], fill(i + 1)
            _combine(staged, [share], op)
            if i + 1 < rounds:
                memory.barrier()


def all_gather(memory: SharedMemory, x: Tensor, out: Tensor, offsets: Sequence[int]) -> None:
    """Put each member m's x into out[offsets[m] : offsets[m + 1]]. x may be this rank's part of out."""
    parts = [out[low:high] for low, high in itertools.pairwise(offsets)]
    if parts[memory.own].data_ptr() != x.data_ptr():
        parts[memory.own].copy_(x)
    takes = [(member, part) for member, part in enumerate(parts) if member != memory.own]
    equal = len({*map(len, parts)}) == 1  # else members differ in x, and agree in out
    _spread(memory, f"all_gather of {_words(x if equal else out)}", x, max(map(len, parts)), takes)


def broadcast(memory: SharedMemory, x: Tensor, source: int) -> None:
    """Copy x from member `source` to all."""
    here = memory.own == source
    what = f"broadcast from rank {memory.name(source)} of {_words(x)}"
    _spread(memory, what, x, len(x), [] if here else [(source, x)], gives=here)


def _spread(
    memory: SharedMemory,
    what: str,
    x: Tensor,
    longest: int,
    takes: Sequence[tuple[int, Tensor]],
    gives: bool = True,
) -> None:
    """Copy members' tensors: `takes` lists each member to read from, and where to.

    longest: elements of the longest member's x. gives: whether this rank's x is read by others.
    """
    with memory.call():
        fill, rounds = _by_chunks(memory, x, longest, gives)
        buffer = _begin(memory, what, x, fill)
        if buffer is None:
            for member, into in takes:
                into.copy_(memory.counterparts(x, len(into))[member])
            memory.barrier()  # after it x may change
            return
        for i in range(rounds):
            staged, buffer = buffer, fill(i + 1)
            for member, into in takes:
                piece = _chunk(into, i)
                piece.copy_(staged[member][: len(piece)])
            if i + 1 < rounds:
                memory.barrier()


def all_to_all(
    memory: SharedMemory, x: Tensor, out: Tensor, sends: Sequence[int], receives: Sequence[int]
) -> None:
    """Exchange parts: x holds sends[m] elements for each member m, and out gets receives[m] from each."""
    n, own = len(memory.members), memory.own
    with memory.call():
        chunk = STAGE // n // x.element_size()
        fill = _by_parts(memory, x.split_with_sizes(list(sends)), chunk)
        parts = out.split_with_sizes(list(receives))
        buffer = fill(0)
        headers = memory.agree(f"all_to_all of {x.dtype}", sizes=(*sends, *receives))
        for a, sender in enumerate(headers):
            for b, receiver in enumerate(headers):
                if sender.sizes[b] != receiver.sizes[n + a]:
                    raise Failed(
                        f"all_to_all: rank {memory.name(a)} sends {sender.sizes[b]} elements to rank "
                        f"{memory.name(b)}, which expects {receiver.sizes[n + a]}; give it "
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
    with memory.call():
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


def _by_parts(memory: SharedMemory, parts: Sequence[Tensor], chunk: int) -> Fill:
    """Return the function that fills this rank's buffer with chunk i of the part for each member."""

    def fill(i: int) -> list[Tensor]:
        buffer = memory.next_buffer(parts[0].dtype)
        for m, part in enumerate(parts):
            piece = part[i * chunk : (i + 1) * chunk]
            buffer[memory.own][m * chunk : m * chunk + len(piece)].copy_(piece)
        return buffer

    return fill


def _by_chunks(memory: SharedMemory, x: Tensor, longest: int, gives: bool = True) -> tuple[Fill, int]:
    """Return the function that fills this rank's buffer with x (or nothing), and the number of chunks."""

    def fill(i: int) -> list[Tensor]:
        buffer, piece = memory.next_buffer(x.dtype), _chunk(x, i)
        if gives:
            buffer[memory.own][: piece.numel()].copy_(piece)
        return buffer

    return fill, -(-longest // (STAGE // x.element_size()))


def _chunk(x: Tensor, i: int) -> Tensor:
    """Return the i-th part of x that a staging buffer holds; empty past the end."""
    size = STAGE // x.element_size()
    return x[i * size : (i + 1) * size]


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
