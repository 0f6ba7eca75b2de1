"""What rank 0 has to know for a step of a single process: the state and the batches of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.transport.host import this_process
from minidist.parallel.contract.batch import Pair, joined, mapped, rows_of, split, tensors, to_device
from minidist.parallel.contract.kept_attributes import KeptAttributes, differs, forwards
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.kept_state import KeptState, plain_attributes
from minidist.parallel.engine.one_process import TrainingState
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.gathering import gather_values
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.training.moved_results import MARGIN


class Collected(NamedTuple):
    """Tensors and values of all ranks."""

    whole: dict[str, Tensor]  # on rank 0, possibly the boxes' own; empty elsewhere
    replicas: list[str]  # names of tensors of which two ranks hold different copies
    values: list[Any]  # of each rank


def collect(
    boxes: Iterable[TensorBox], device: torch.device, value: Any = None, compare: bool = True
) -> Collected:
    """Whole tensors on rank 0 from the boxes that all ranks hold; a collective.

    Ranks exchange tables of their boxes, some 100 bytes each, together with a `value`. Each box comes from
    the lowest rank with it. compare: whether to tell copies that differ.
    """
    own = {(b.name, b.offsets, tuple(b.tensor.shape)): b for b in boxes}
    table = [
        (*key, b.shape, str(b.tensor.dtype).removeprefix("torch."), *(_sums(b.tensor) if compare else (0, 0)))
        for key, b in own.items()
    ]
    gathered = gather_values((table, value))
    holder: dict[Any, tuple[int, float, float]] = {}
    replicas: dict[str, None] = {}
    for rank, (rows, _) in enumerate(gathered):
        for *key, _, dtype, total, size in rows:
            at, *sums = holder.setdefault((*key,), (rank, total, size))
            kind = getattr(torch, dtype)
            bits = torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0
            apart = max(abs(total - sums[0]), abs(size - sums[1]))
            both_nan = total != total and sums[0] != sums[0]
            if at != rank and not apart <= MARGIN * bits * sums[1] and not both_nan:
                replicas[key[0]] = None
    mine, whole = comm.rank(), dict[str, Tensor]()
    for rank, (rows, _) in enumerate(gathered):
        held = [row for row in rows if holder[row[:3]][0] == rank]
        if mine == rank and mine:
            sent = [_bytes(own[row[:3]].tensor) for row in held]
            if any(map(len, sent)):
                comm.send(torch.cat(sent), 0)
        elif not mine:
            kinds = [(getattr(torch, row[4]), torch.Size(row[2])) for row in held]
            sizes = [kind.itemsize * size.numel() for kind, size in kinds]
            flat = torch.empty(sum(sizes) if rank else 0, dtype=torch.uint8, device=comm.device())
            pieces = torch.split(comm.recv(flat, rank), sizes) if len(flat) else None
            for i, (row, (kind, size)) in enumerate(zip(held, kinds, strict=True)):
                name, offsets, _, shape = row[:4]
                here = pieces[i].clone().view(kind).view(size) if pieces else own[row[:3]].tensor.detach()
                if name not in whole and size == shape:
                    whole[name] = here.to(device)
                    continue
                if name not in whole:
                    whole[name] = torch.zeros(shape, dtype=kind, device=device)
                narrowed(whole[name], offsets, size).copy_(here)
    return Collected(whole, [*replicas], [value for _, value in gathered])


def state_before(
    engine: Engine, kept: KeptState, pairs: Sequence[Pair], known: Mapping[tuple[str, str], Any]
) -> TrainingState | None:
    """The whole state before a step, with the batches of all ranks, on rank 0; a collective.

    known: the modules' attributes when the model was cut, of which those that have changed count.
    """
    settings = engine.state_settings()
    rows: list[Any] = []
    if not engine._is_padding and not any(engine.mesh.rank(axis) for axis in ("pp", "cp", "tp")):
        rows = [(mapped(Tensor.cpu, x), x is y, mapped(Tensor.cpu, y)) for x, y in pairs]
    named = engine.model.named_parameters(remove_duplicate=False)
    host = this_process().host
    facts = settings["state"], {n: p.requires_grad for n, p in named}, rows, (host, torch.get_num_threads())
    boxes = engine.placement.boxes(box for each in kept.chunks.values() for box in each)
    found = collect(boxes, engine.device, facts, compare=False)
    if comm.rank():
        return None
    numbers: dict[str, Any] = {}
    trained: dict[str, bool] = {}
    batches: list[list[Pair]] = []
    threads = 0
    for state, requires_grad, given, (where, own) in found.values:
        numbers |= state
        trained |= requires_grad
        threads += own if where == host else 0
        placed = [(to_device(x, engine.device), is_one, y) for x, is_one, y in given]
        if given or not batches:  # rank 0 comes first, with or without rows
            batches.append([(x, x if is_one else to_device(y, engine.device)) for x, is_one, y in placed])
    now = plain_attributes(engine.model)
    return TrainingState(
        found.whole,
        settings["groups"],
        numbers,
        trained,
        {name: part.training for name, part in engine.model.named_modules()},
        KeptAttributes(engine.loss, *forwards(engine.model)),
        {key: value for key, value in now.items() if key not in known or differs(value, known[key])},
        [*engine.model.parameters()],
        batches,
        threads,
    )


def whole_batch(pieces: Sequence[Pair]) -> list[Pair]:
    """The pieces of a batch as one if their rows can be joined; else each row, or with objects the pieces."""
    first = pieces[0]
    if len(pieces) == 1 or any(_others(each) != _others(first) for each in pieces):
        return [*pieces]
    if any(_form(each) != _form(first) for each in pieces):  # the rows of other ranks have other lengths
        return [row for piece in pieces for row in micro_batches(piece, rows_of(piece[0]))]
    inputs = joined([x for x, _ in pieces])
    return [(inputs, inputs if first[0] is first[1] else joined([y for _, y in pieces]))]


def _others(value: Any) -> list[Any]:
    """What is no tensor in a batch, such as a graph or strings, and goes along uncut."""
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return [each for part in parts for each in _others(part)]
    if isinstance(value, Tensor) or any(tensors(value)):  # a dataclass
        return []
    return [value if isinstance(value, str | int | float | None) else id(value)]


def _form(pair: Pair) -> list[Any]:
    return [(name, x.dtype, x.shape[1:]) for name, x in tensors(pair)]


def micro_batches(pair: Pair, parts: int) -> list[Pair]:
    """The rows of a batch as an engine cuts them."""
    inputs, targets = pair
    parts = min(parts, rows_of(inputs))
    if parts <= 1:
        return [pair]
    cut = split(inputs, parts)
    return [*zip(cut, cut if targets is inputs else split(targets, parts), strict=True)]


def _bytes(x: Tensor) -> Tensor:
    """A tensor's bytes, as a flat tensor to send."""
    return x.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).to(comm.device())


def _sums(x: Tensor) -> tuple[float, float]:
    """Two numbers that equal copies share up to rounding: the sum, and that of the magnitudes."""
    x = x.detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    x = x if x.is_floating_point() and x.itemsize > 1 else x.double()  # torch has no magnitudes of bools
    return float(x.sum(dtype=torch.float64)), float(x.abs().sum(dtype=torch.float64))
