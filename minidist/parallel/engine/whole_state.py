"""The whole state of a training before a step: a copy to restore, and what rank 0 needs to step alone.

`KeptState` restores an engine's tensors and settings as a checkpoint does. What Python code keeps from one
call to the next, such as a counter in a loss, is in no checkpoint; `KeptAttributes` puts that back. To take a
step alone, rank 0 collects the state before the step (`collect`) and the batches of all ranks.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from minidist import comm
from minidist.parallel.contract.batch import Pair, is_row_list, joined, mapped, rows_of, split, tensors
from minidist.parallel.contract.kept_attributes import KeptAttributes, differs, forwards, plain_attributes
from minidist.parallel.contract.tensor_boxes import TensorBox, common_part
from minidist.parallel.contract.training_state import by_name_and_key
from minidist.parallel.engine.step_executor import IGNORED
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.gathering import gather_values
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.sharding import state_by_name
from minidist.parallel.training.comparable_steps import MARGIN
from minidist.parallel.training.random_state import random_states, set_random_states


class KeptState:
    """A copy of an engine's state, of the attributes of its model and loss, and of the random states.

    What gradient compression has kept back is left out: `restore` drops it. PowerSGD's factors stay.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings, self.norm = engine, engine.settings(), engine.grad_norm
        self.of_strategy = copy.deepcopy(state_by_name.settings(engine.strategy))
        self.boxes: dict[str, list[TensorBox]] = defaultdict(list)
        for box in state_by_name.state_boxes(engine.strategy):
            self.boxes[box.name].append(box._replace(tensor=box.tensor.clone()))
        self.attributes = KeptAttributes(engine.model, engine.loss)
        self.random = random_states()

    def draws_elsewhere(self) -> str:
        """The generator other than torch's that has drawn since, if any."""
        now = random_states()
        if now["python"] != self.random["python"]:
            return "Python's"
        return "" if pickle.dumps(now["numpy"]) == pickle.dumps(self.random["numpy"]) else "NumPy's"

    def restore(self) -> None:
        """Restore the engine, as loading a checkpoint would; an optimizer that has not run gets no state."""
        strategy = self.engine.strategy
        kinds = ((name, (box.shape, box.tensor.dtype)) for name, (box, *_) in self.boxes.items())
        state_by_name.load_settings(strategy, copy.deepcopy(self.of_strategy), by_name_and_key(kinds))
        strategy.drop()
        for box in state_by_name.state_boxes(strategy):
            for kept in self.boxes[box.name]:  # the first step may have moved the boxes
                common = common_part(box.offsets, box.tensor.shape, kept.offsets, kept.tensor.shape)
                if common is not None:
                    here, there, sizes = common
                    narrowed(box.tensor, here, sizes).copy_(narrowed(kept.tensor, there, sizes))
        state_by_name.loaded(strategy)
        self.engine.load_settings(self.settings)
        self.engine.grad_norm = self.norm
        self.attributes.restore()
        set_random_states(self.random)


class Collected(NamedTuple):
    """Tensors and values of all ranks."""

    before: dict[str, Tensor]  # on rank 0, possibly the boxes' own; empty elsewhere
    after: dict[str, Tensor]
    replicas: list[str]  # names of tensors whose copies on two ranks differ after the step
    values: list[Any]  # of each rank


def collect(
    before: Iterable[TensorBox], after: Iterable[TensorBox], device: torch.device, value: Any
) -> Collected:
    """Collect whole tensors on rank 0 from the boxes that all ranks hold before and after a step.

    A collective. Every rank sends all others a table of its boxes, some 100 bytes for each, and `value`. Then
    it sends rank 0 the boxes that no lower rank has.
    """
    found = [(late, box) for late, boxes in enumerate((before, after)) for box in boxes]
    own = {(late, x.name, x.offsets, tuple(x.tensor.shape)): x for late, x in found}
    sums = {key: _sums(x.tensor) if key[0] else () for key, x in own.items()}
    table = [(key, x.shape, x.tensor.dtype, sums[key]) for key, x in own.items()]
    gathered = gather_values((table, value))
    holder: dict[Any, tuple[int, tuple[float, ...]]] = {}
    replicas: dict[str, None] = {}
    for rank, (rows, _) in enumerate(gathered):
        for key, _, kind, sums_there in rows:
            at, others = holder.setdefault(key, (rank, sums_there))
            bits = torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0
            for x, y in zip(sums_there, others, strict=True):
                if at != rank and not abs(x - y) <= MARGIN * bits * others[1] and (x == x or y == y):
                    replicas[key[1]] = None

    whole: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for rank, (rows, _) in enumerate(gathered):
        held = [row for row in rows if holder[row[0]][0] == rank]
        if comm.rank() == rank and rank:
            sent = [_bytes(own[key].tensor) for key, *_ in held]
            if any(map(len, sent)):
                comm.send(torch.cat(sent), 0)
        if comm.rank():
            continue
        here = _received(held, rank) if rank else [own[key].tensor.detach() for key, *_ in held]
        for (key, shape, kind, _), x in zip(held, here, strict=True):
            late, name, offsets, size = key
            if size == shape and name not in whole[late]:
                whole[late][name] = x.to(device)
                continue
            if name not in whole[late]:
                whole[late][name] = torch.zeros(shape, dtype=kind, device=device)
            narrowed(whole[late][name], offsets, size).copy_(x)
    return Collected(*whole, [*replicas], [value for _, value in gathered])


def _received(rows: Sequence[Any], rank: int) -> list[Tensor]:
    """The tensors in these rows of a rank's table."""
    kinds = [(kind, torch.Size(key[3])) for key, _, kind, _ in rows]
    sizes = [kind.itemsize * size.numel() for kind, size in kinds]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=comm.device())
    parts = torch.split(comm.recv(flat, rank) if len(flat) else flat, sizes)
    return [x.clone().view(kind).view(size) for x, (kind, size) in zip(parts, kinds, strict=True)]


def _bytes(x: Tensor) -> Tensor:
    """A tensor's bytes, as a flat tensor to send."""
    return x.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).to(comm.device())


def _sums(x: Tensor) -> tuple[float, float]:
    """The sum of the elements, and the sum of their magnitudes: equal for equal copies, up to rounding."""
    x = x.detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    x = x if x.is_floating_point() and x.itemsize > 1 else x.double()  # torch has no magnitudes of bools
    return float(x.sum(dtype=torch.float64)), float(x.abs().sum(dtype=torch.float64))


Batch = tuple[Any, ...]
"""Inputs and targets, or both as one."""


class OwnPart(NamedTuple):
    """What a rank tells rank 0 before a step, apart from tensors."""

    numbers: Mapping[str, Mapping[str, Any]]  # in the optimizer's state, by parameter
    trained: Mapping[str, bool]  # whether each parameter gets gradients
    batches: list[Batch]  # copies of this rank's, if no rank before it has the same rows


class TrainingState(NamedTuple):
    """The whole state of a training before a step, by the names that checkpoints use."""

    groups: list[dict[str, Any]]  # of the optimizer, with names of parameters
    attributes: Mapping[tuple[str, str], Any]  # of modules, that passes have changed; and their modes
    of_functions: KeptAttributes  # what the loss and `forward` keep
    elsewhere: Sequence[Tensor]  # the engine's own parameters
    tensors: Mapping[str, Tensor]  # "model.NAME", "optimizer.NAME.KEY"
    parts: Sequence[OwnPart]  # of all ranks


def own_part(engine: Engine, kept: KeptState, pairs: Sequence[Pair]) -> OwnPart:
    """This rank's part."""
    has_rows = not engine.is_padding and not any(engine.mesh.rank(axis) for axis in ("pp", "cp", "tp"))
    batches: list[Batch] = [pair[:1] if pair[0] is pair[1] else pair for pair in pairs] if has_rows else []
    named = engine.model.named_parameters(remove_duplicate=False)
    return OwnPart(
        engine.tensor_map.settings(kept.of_strategy)["state"],
        {name: parameter.requires_grad for name, parameter in named},
        [mapped(_copy, batch) for batch in batches],  # the model may write to its rows
    )


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True).requires_grad_(x.requires_grad)


def state_before(engine: Engine, kept: KeptState, known: Mapping[tuple[str, str], Any]) -> TrainingState:
    """What rank 0 itself knows. known: the modules' attributes when the model was cut."""
    now = plain_attributes(engine.model)
    changed = {key: value for key, value in now.items() if key not in known or differs(value, known[key])}
    functions = KeptAttributes(engine.loss, *forwards(engine.model))
    groups = engine.tensor_map.settings(kept.of_strategy)["groups"]
    return TrainingState(groups, changed, functions, [*engine.model.parameters()], {}, [])


# The rows of all ranks as one process takes them.


def whole_batch(pieces: Sequence[Batch]) -> tuple[Sequence[Batch], bool]:
    """Join the ranks' pieces of a batch into the batch of one process; also whether that is sure.

    Where each rank has padded its rows to a different length, pad them to the longest. If the pieces do not
    show what they are padded with, they stay apart, and nothing is sure. They also stay apart if they hold
    objects that only the caller could join, such as graphs; one process then takes them one after the other.
    """
    first = pieces[0]
    if len(pieces) == 1 or any(_objects(each) != _objects(first) for each in pieces):
        return pieces, True
    kinds = [[(name, x.dtype, x.dim()) for name, x in tensors(piece)] for piece in pieces]
    if any(each != kinds[0] for each in kinds):
        return pieces, False
    padded = [_padded(x) for x in zip(*([x for _, x in tensors(piece)] for piece in pieces), strict=True)]
    if not all(padded):
        return pieces, False
    own = [iter(x) for x in zip(*padded, strict=True)]
    same = [mapped(lambda _, x=x: next(x), piece) for piece, x in zip(pieces, own, strict=True)]  # type: ignore[misc]
    return [joined(same)], True


def _objects(value: Any, rows: int | None = None) -> list[Any]:
    """The objects in a batch that are not cut by rows, such as graphs and numbers."""
    rows = rows_of(value) if rows is None else rows
    if isinstance(value, Tensor) or (isinstance(value, list | tuple) and is_row_list(value, rows)):
        return []
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return [each for part in parts for each in _objects(part, rows)]
    if any(tensors(value)):  # a dataclass
        return []
    return [value if isinstance(value, str | int | float | None) else id(value)]


def _padded(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor as each rank has it, padded in the axis in which they differ; empty if no padding shows."""
    axes = [
        i for i, sizes in enumerate(zip(*(x.shape for x in parts), strict=True)) if i and len({*sizes}) > 1
    ]
    found = _padding([x.movedim(axes[0], 1) for x in parts]) if len(axes) == 1 else None
    if found is None:
        return [] if axes else parts
    (axis,), (value, at_start) = axes, found
    longest = max(x.shape[axis] for x in parts)
    ends = [(longest - x.shape[axis], 0) if at_start else (0, longest - x.shape[axis]) for x in parts]
    others = (0, 0) * (parts[0].dim() - 1 - axis)  # the last axes come first
    return [functional.pad(x, (*others, *end), value=value) for x, end in zip(parts, ends, strict=True)]


def _padding(parts: Sequence[Tensor]) -> tuple[Any, bool] | None:
    """The value that fills axis 1 of short rows, and whether at their start; None if none can be told.

    Such a value stands at the end of some rows, twice or more, and nowhere else (but labels may be `IGNORED`
    anywhere). On each rank the longest row does not end with it. Of several such values, take the most
    frequent one.
    """
    if not all(x.numel() for x in parts):
        return None
    count = Counter[tuple[Any, bool]]()
    for at_start in (False, True):
        rows = [(x if at_start else x.flip(1)).reshape(*x.shape[:2], -1) for x in parts]
        for value in {v for x in rows for v, *more in x[:, 0].tolist() if all(each == v for each in more)}:
            found = [(x == value).all(2).long() for x in rows]
            runs = [each.cumprod(1).sum(1) for each in found]
            elsewhere = value != IGNORED and any(
                int(x.sum()) > int(n.sum()) for x, n in zip(found, runs, strict=True)
            )
            if max(int(n.max()) for n in runs) > 1 and not any(int(n.min()) for n in runs) and not elsewhere:
                count[value, at_start] = sum(int(n.sum()) for n in runs)
    (best, most), (_, second) = [*count.most_common(2), (None, 0), (None, 0)][:2]
    return best if most > second else None


def micro_batches(batch: Batch, parts: int) -> Sequence[Batch]:
    """The rows of a batch as an engine cuts them."""
    found: Sequence[Batch] = split(batch, max(1, min(parts, rows_of(batch))))
    return found
