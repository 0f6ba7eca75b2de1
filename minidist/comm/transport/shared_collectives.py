"""Collectives through shared memory: ranks of one host read each other's tensors where they lie.

Each rank reduces its n-th of the tensor over all ranks' memory, and the others take the result from there:
the ring's reduce-scatter and all-gather, with as many bytes read from other ranks as a ring sends, but in
two steps in place of 2 (n - 1), and with no copy through a socket. Tensors pass through a core's cache in
pieces, so that main memory is read once and written once.

Where all ranks' tensors lie in shared memory (`comm.empty_shared`), that is all. Others go through staging
buffers in chunks. While chunk i is reduced, chunk i + 1 is copied in; one meeting a chunk keeps the ranks
closer together than the three buffers are apart.

Source of the split: Patarasuk and Yuan 2009, section 3. The functions take flat, contiguous tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidist.comm.transport.shared_memory import STAGE, Failed, SharedMemory

PIECE = 2**17
"""Bytes that are reduced at once: those of a few ranks fit into the L2 cache of a core."""

COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


Fill = Callable[[int], list[Tensor]]
"""Puts this rank's chunk i, where there is one, into the next staging buffers, and returns these."""


def all_reduce(memory: SharedMemory, x: Tensor, op: str) -> None:
    """Reduce x over the members, in place: all of them get the same bits."""
    with memory.call():
        fill, rounds = _by_chunks(memory, x, x.numel())
        buffer = _begin(memory, f"all_reduce ({op}) of {_words(x)}", x, fill)
        if buffer is None:
            everyones = memory.everyones(x)
            _reduce(memory, everyones, everyones, op)
            memory.meet()
            return
        for i in range(rounds):
            chunk = _chunk(x, i)
            staged = [part[: chunk.numel()] for part in buffer]
            _reduce(memory, staged, staged[:1], op)
            buffer = fill(i + 1)
            memory.meet()
            chunk.copy_(staged[0])


def reduce_scatter(memory: SharedMemory, x: Tensor, out: Tensor, op: str, offsets: Sequence[int]) -> None:
    """Reduce x over the members, and put this rank's share, x[offsets[own] : offsets[own + 1]], into out.

    out may be that very part of x.
    """
    n, own = len(memory.members), memory.own
    with memory.call():
        parts = [x[low:high] for low, high in itertools.pairwise(offsets)]
        chunk = STAGE // n // x.element_size()
        rounds = -(-max(map(len, parts)) // chunk)

        def fill(i: int) -> list[Tensor]:
            buffer = memory.next_buffer(x.dtype)
            for m, part in enumerate(parts):
                piece = part[i * chunk : (i + 1) * chunk]
                buffer[own][m * chunk : m * chunk + len(piece)].copy_(piece)
            return buffer

        buffer = _begin(memory, f"reduce_scatter ({op}) of {_words(x)}", x, fill)
        if buffer is None:
            shares = [part[offsets[own] : offsets[own + 1]] for part in memory.everyones(x)]
            if shares[own].data_ptr() == out.data_ptr():  # a part of x, not to be overwritten unread
                shares[0], shares[own] = shares[own], shares[0]
            _combine(shares, [out], op)
            memory.meet()  # x may change from here on
            return
        for i in range(rounds):
            share = out[i * chunk : (i + 1) * chunk]
            staged, buffer = [part[own * chunk :][: len(share)] for part in buffer], fill(i + 1)
            _combine(staged, [share], op)
            if i + 1 < rounds:
                memory.meet()


def all_gather(memory: SharedMemory, x: Tensor, out: Tensor, offsets: Sequence[int]) -> None:
    """Put each member m's x into out[offsets[m] : offsets[m + 1]], of which x may be this rank's part."""
    parts = [out[low:high] for low, high in itertools.pairwise(offsets)]
    if parts[memory.own].data_ptr() != x.data_ptr():
        parts[memory.own].copy_(x)
    takes = [(member, part) for member, part in enumerate(parts) if member != memory.own]
    _spread(memory, f"all_gather of {_words(out)}", x, max(map(len, parts)), takes)


def broadcast(memory: SharedMemory, x: Tensor, source: int) -> None:
    """Copy x from the member at place `source` to all."""
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
    """Show x, of which the members' longest has `longest` elements, to the others; take theirs."""
    with memory.call():
        fill, rounds = _by_chunks(memory, x, longest, gives)
        buffer = _begin(memory, what, x, fill)
        if buffer is None:
            for member, into in takes:
                into.copy_(memory.everyones(x, len(into))[member])
            memory.meet()  # x may change from here on
            return
        for i in range(rounds):
            staged, buffer = buffer, fill(i + 1)
            for member, into in takes:
                piece = _chunk(into, i)
                piece.copy_(staged[member][: len(piece)])
            if i + 1 < rounds:
                memory.meet()


def all_to_all(
    memory: SharedMemory, x: Tensor, out: Tensor, sends: Sequence[int], comes: Sequence[int]
) -> None:
    """Exchange parts: x holds one of length sends[m] for each member m, out gets comes[m] from each."""
    n, own = len(memory.members), memory.own
    with memory.call():
        chunk = STAGE // n // x.element_size()
        starts, ends = ([sum(sizes[:m]) for m in range(n)] for sizes in (sends, comes))

        def fill(i: int) -> list[Tensor]:
            buffer = memory.next_buffer(x.dtype)
            for m in range(n):
                piece = x[starts[m] : starts[m] + sends[m]][i * chunk : (i + 1) * chunk]
                buffer[own][m * chunk : m * chunk + len(piece)].copy_(piece)
            return buffer

        buffer = fill(0)
        headers = memory.agree(f"all_to_all of {x.dtype}", sizes=(*sends, *comes))
        for a, sender in enumerate(headers):
            for b, receiver in enumerate(headers):
                if sender.sizes[b] != receiver.sizes[n + a]:
                    raise Failed(
                        f"all_to_all: rank {memory.name(a)} sends {sender.sizes[b]} elements to rank "
                        f"{memory.name(b)}, which expects {receiver.sizes[n + a]}; its output_rows have to "
                        "say what comes"
                    )
        rounds = -(-max(max(header.sizes) for header in headers) // chunk)
        for i in range(rounds):
            staged, buffer = buffer, fill(i + 1)
            for m in range(n):
                piece = out[ends[m] : ends[m] + comes[m]][i * chunk : (i + 1) * chunk]
                piece.copy_(staged[m][own * chunk : own * chunk + len(piece)])
            if i + 1 < rounds:
                memory.meet()


def barrier(memory: SharedMemory) -> None:
    """Wait for the other members."""
    with memory.call():
        memory.agree("barrier")


def _begin(memory: SharedMemory, what: str, x: Tensor, fill: Fill) -> list[Tensor] | None:
    """Agree on a call. None: everyone's x can be read in place; else the buffers with everyone's chunk 0."""
    segment, offset = memory.place_of(x)
    buffer = None if segment else fill(0)
    headers = memory.agree(what, segment, offset)
    if segment and all((header.segment, header.offset) == (segment, offset) for header in headers):
        return None
    if any(header.segment for header in headers):  # some have not filled theirs
        buffer = fill(0) if buffer is None else buffer
        memory.meet()
    return buffer


def _by_chunks(memory: SharedMemory, x: Tensor, longest: int, gives: bool = True) -> tuple[Fill, int]:
    """Return what fills this rank's buffer with x, unless it gives nothing, and the chunks of the longest."""

    def fill(i: int) -> list[Tensor]:
        buffer, piece = memory.next_buffer(x.dtype), _chunk(x, i)
        if gives:
            buffer[memory.own][: piece.numel()].copy_(piece)
        return buffer

    return fill, -(-longest // (STAGE // x.element_size()))


def _chunk(x: Tensor, i: int) -> Tensor:
    """Return what goes through the staging buffers at once; nothing past the end."""
    size = STAGE // x.element_size()
    return x[i * size : (i + 1) * size]


def _reduce(memory: SharedMemory, sources: Sequence[Tensor], targets: Sequence[Tensor], op: str) -> None:
    """Combine this rank's n-th of the sources into that of the targets."""
    length, n = sources[0].numel(), len(memory.members)
    own = slice(memory.own * length // n, (memory.own + 1) * length // n)
    _combine([part[own] for part in sources], [part[own] for part in targets], op)


def _combine(sources: Sequence[Tensor], targets: Sequence[Tensor], op: str) -> None:
    """Combine the sources, in their order, into all targets; targets are the sources or none of them.

    The first target may be the first source alone, too.
    """
    combine, size = COMBINE[op], max(1, PIECE // sources[0].element_size())
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
