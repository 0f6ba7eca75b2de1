"""`record`: outputs, gradients and updates of an engine's layers in a few steps, and the effect of rounding.

The engine takes the same steps again while the last bit of every module's results is moved at random
(training/comparable_steps.py). Rounding explains the changes that this causes.

The tensors are whole, from the pieces that the ranks hold. Data-parallel ranks have different rows,
context-parallel ranks different positions of a sequence in zigzag order. Tensor-parallel ranks have copies,
or parts of the sequence, or, of the logits, parts of the last dimension. Copies that differ are kept apart:
the caller looks for such a difference.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from minidist._arguments import check_whole
from minidist.parallel.context_parallel import zigzag_order
from minidist.parallel.contract.batch import as_batch, rows, rows_of, tensors
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.engine.whole_state import KeptState
from minidist.parallel.flat.gathering import gather_values, raw_bytes
from minidist.parallel.training.comparable_steps import apart, forward_hooks, moved_results

REPEATS = 2
"""How often the steps are taken again with moved results."""
LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
RankCopies = list[Tensor]
"""A whole tensor; several if ranks that should hold equal copies do not, or the last dimension is cut."""
Step = dict[str, RankCopies]


@dataclass(frozen=True, eq=False)
class Recording:
    """The tensors of a few steps, the same on all ranks: whole, as one process would have them, on the CPU.

    A step's tensors are named "output NAME" and "gradient NAME" (of the output) for a layer, and "update
    NAME" for a parameter.
    """

    layout: str
    layers: list[str]  # their names, in the order in which they run
    start: dict[str, Tensor]  # the parameters before the first step
    first_names: dict[str, str]  # of the same parameters: another name for one that is tied to an earlier one
    losses: list[float]
    steps: list[Step]
    rounding: list[dict[str, float]]  # by the same names, the largest change when results were moved


def record(engine: Engine, batches: Iterable[Any], repeats: int = REPEATS) -> Recording:
    """Train `engine` on global batches and record its layers; then restore it.

    All ranks call it with the same batches. It takes the steps `repeats` + 1 times and gathers every layer's
    outputs and gradients on every rank, so use it for small models and few steps. It does not restore the
    state of gradient compression: what compression kept back is dropped, and PowerSGD's factors stay.

    Args:
        engine: from `prepare`. Its layers are the modules in the model's lists, and the modules next to the
            lists. What `forward` computes between two layers belongs to the next one. If a layer has several
            outputs, the first tensor is recorded, provided that its first dimension is the rows.
        batches: whole global batches as `Engine.step` takes them, such as pairs of inputs and targets.
        repeats: how often to measure the effect of rounding.

    Raises:
        TypeError: the engine is not from `prepare`, or a batch has no tensors.
        ValueError: no batches, repeats below 0, or a model with dropout, whose masks depend on the layout.
    """
    if not isinstance(engine, Engine):
        raise TypeError(f"engine is a {type(engine).__name__}; give one that md.prepare returned")
    given = batches_of(batches)
    check_whole("repeats", repeats, 0)
    for name, module in engine.model.named_modules():
        dropout = getattr(module, "dropout", getattr(module, "p", 0.0))
        if isinstance(dropout, float) and dropout > 0:
            raise ValueError(
                f"{name or 'the model'} has dropout {dropout}, and what it drops depends on the layout; "
                "compare layouts with dropout 0"
            )
    kept, start = KeptState(engine), _parameters(engine)
    rehearsal, engine.rehearsal = engine.rehearsal, None
    losses, steps = _run(engine, given, start, None)
    kept.restore()
    rounding: list[dict[str, float]] = [defaultdict(float) for _ in steps]
    for repeat in range(repeats):
        _, moved = _run(engine, given, start, repeat)
        kept.restore()
        for most, plain, other in zip(rounding, steps, moved, strict=True):
            for name in plain.keys() & other.keys():
                most[name] = max(most[name], distance(plain[name], other[name]))
    engine.rehearsal = rehearsal
    called = [key.removeprefix("output ") for key in steps[0] if key.startswith("output ")]
    layers = in_order([name for name, _ in layers_of(engine.model)], called, engine.layout.chunks > 1)
    first_names = {name: engine.tensor_map.first.get(name, name) for name in start}
    most_moved = [dict(most) for most in rounding]
    return Recording(str(engine.layout), layers, start, first_names, losses, steps, most_moved)


def batches_of(batches: Iterable[Any]) -> list[Any]:
    """The batches as a list; TypeError or ValueError if they are none."""
    remedy = "give a list of pairs, [(inputs, targets), ...], of tensors, or of dicts of them"
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise TypeError(f"batches is a {type(batches).__name__}; {remedy}")
    given = [*batches]
    if not given:
        raise ValueError("batches is empty; give at least one pair of inputs and targets")
    for index, batch in enumerate(given):
        if isinstance(batch, Tensor) or not any(x.dim() for _, x in tensors(batch)):
            raise TypeError(f"batch {index} is a {type(batch).__name__}, not a pair of tensors; {remedy}")
    return [as_batch(batch) for batch in given]


def _run(
    engine: Engine, batches: Sequence[Any], before: dict[str, Tensor], repeat: int | None
) -> tuple[list[float], list[Step]]:
    """Take the steps from parameters `before`; return losses and whole tensors. repeat: of moved results."""
    losses, steps = [], []
    for batch in batches:
        own_rows = slice(*(rows_of(batch) * (engine.data_rank + i) // engine.data_ranks for i in (0, 1)))
        pieces: dict[str, dict[int, Tensor]] = defaultdict(dict)
        keep = partial(_keep, pieces, engine.part.stages)
        moved = nullcontext() if repeat is None else moved_results(engine.model, repeat)
        with moved, forward_hooks(layers_of(engine.model), keep):
            scale = engine.loss_scale
            losses.append(engine.step(rows(batch, own_rows)))
        joined = {name: torch.cat([of_call[i] for i in sorted(of_call)]) for name, of_call in pieces.items()}
        count = max(1, own_rows.stop - own_rows.start)
        own = {name: value for name, value in joined.items() if len(value) % count == 0}
        length = next((x.shape[1] for _, x in tensors(batch) if x.dim() > 1), 1)
        found = assemble(own, engine.layout, length)
        for name, copies in found.items():
            if name.startswith("gradient"):
                found[name] = [each / scale for each in copies]
        after = _parameters(engine)
        found.update(distinct({f"update {name}": after[name] - before[name] for name in after}))
        steps.append(found)
        before = after
    return losses, steps


def _parameters(engine: Engine) -> dict[str, Tensor]:
    """All parameters in full; this rank's own copy of each one that it holds whole."""
    own = {name: value.clone() for name, value in engine.strategy.whole()}
    return {
        name: (own[name] if name in own and own[name].shape == value.shape else value).cpu()
        for name, value in engine.full_state_dict().items()
        if value.is_floating_point()
    }


def _keep(
    pieces: dict[str, dict[int, Tensor]],
    stages: Sequence[nn.Module],
    name: str,
    layer: nn.Module,
    inputs: Any,
    output: Any,
) -> None:
    """Keep a layer's output and later its gradient, by name and by call (one for each micro-batch).

    stages: of a pipeline on this rank; what one computes before its own layers is another's work. Passes
        without gradients are the first step's check of its plan.
    """

    def keep(key: str, call: int, value: Tensor) -> None:
        pieces[key][call] = value.detach().cpu().clone()

    output = next((x for _, x in tensors(output)), None) if torch.is_grad_enabled() else None
    if output is not None and output.dim() and not any(getattr(stage, "skips", False) for stage in stages):
        call = len(pieces[f"output {name}"])
        keep(f"output {name}", call, output)
        if output.requires_grad:
            output.register_hook(partial(keep, f"gradient {name}", call))


def layers_of(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers in the model's lists, at any depth, and the modules beside the lists, with their names."""
    found = []
    for name, child in model.named_children():
        uncalled = isinstance(child, nn.ModuleList | nn.ModuleDict)  # and so without an output of its own
        holds_lists = any(isinstance(part, LISTS) for part in child.modules())
        if uncalled or (holds_lists and not isinstance(model, LISTS)):
            found += layers_of(child, f"{prefix}{name}.")
        else:
            found.append((prefix + name, child))
    return found


def in_order(layers: Sequence[str], called: Iterable[str], chunked: bool) -> list[str]:
    """The layers in the order in which a model calls them; those that it does not call come last.

    called: their names as they first ran, with a pipeline stage after stage. chunked: whether a stage has
    several runs of a list's layers, with layers of other stages in between. Then layers go by their index.
    """
    order = [*dict.fromkeys([*called, *layers])]
    if chunked:
        of_list: dict[str, list[str]] = {}
        for name in layers:
            of_list.setdefault(name.rpartition(".")[0], []).append(name)
        following = {name: iter(names) for name, names in of_list.items() if name}
        order = [next(following.get(name.rpartition(".")[0], iter([name]))) for name in order]
    return order


def assemble(own: dict[str, Tensor], layout: Layout, length: int) -> dict[str, RankCopies]:
    """Whole tensors from all ranks' pieces, on every rank; all ranks call it.

    Leaves out tensors that only some ranks of a stage have. Sends n - 1 times 8 bytes, and n - 1 times the
    longest rank's pieces with their names.

    own: this rank's pieces by name, on the CPU; other ranks may have other names. Neighbours share matrices
    (tp), then positions (cp), then rows (dp). length: of the whole sequences, if they are cut.
    """
    tensors: list[dict[str, Tensor]] = gather_values(own)
    names = dict.fromkeys(name for found in tensors for name in found)
    found_whole = {name: _whole(name, tensors, layout, length) for name in names}
    return {name: copies for name, copies in found_whole.items() if copies}


def distance(a: RankCopies, b: RankCopies) -> float:
    """The largest difference between elements of two tensors, over all their copies.

    NaN equals NaN. The distance of NaN from a number, and of tensors of different shapes, is infinite.
    """
    a, b = _alike(a, b)
    pairs = zip(a, b, strict=True) if len(a) == len(b) else product(a, b)
    return max(apart(x, y) for x, y in pairs)


def _alike(a: RankCopies, b: RankCopies) -> tuple[RankCopies, RankCopies]:
    """Both tensors; where that makes the shapes equal, with the parts of a last dimension joined."""
    for x in _forms(a, b):
        for y in _forms(b, a):
            if x[0].shape == y[0].shape:
                return x, y
    return a, b


def _forms(copies: RankCopies, other: RankCopies) -> Iterator[RankCopies]:
    """Yield what the copies may be: copies, or parts; a single one may stand for several equal parts."""
    yield copies
    shapes = {x.shape[:-1] for x in (*copies, *other)}
    if copies[0].dim() < 2 or len(shapes) > 1:
        return
    own, width = (sum(x.shape[-1] for x in each) for each in (copies, other))
    if len(copies) > 1:
        yield [torch.cat(copies, -1)[..., :width]]  # without the padding of the last part
    elif 0 < own < width:
        yield [torch.cat([*copies] * (width // own), -1)]


def _whole(name: str, tensors: list[dict[str, Tensor]], layout: Layout, length: int) -> RankCopies:
    """One tensor, joined from rows over dp, positions over cp, and copies or parts over tp."""
    pp, dp, cp, tp = layout.pp, layout.dp, layout.cp, layout.tp
    of_tp = [tensors[rank : rank + tp] for rank in range(0, len(tensors), tp)]  # (pp, dp, cp) flat
    found: RankCopies = []
    for stage in range(pp):
        groups = of_tp[stage * dp * cp : (stage + 1) * dp * cp]
        if not all(name in part for group in groups for part in group):
            continue
        joined: list[RankCopies] = []
        for index, group in enumerate(groups):
            share = zigzag_order.size(length, cp, index % cp) if layout.sequence_parallel else None
            joined.append(_join_tp([part[name] for part in group], share))
        for copy in range(max(map(len, joined))):
            parts = [copies[min(copy, len(copies) - 1)] for copies in joined]
            rows = [parts[row * cp : (row + 1) * cp] for row in range(dp)]
            found.append(torch.cat([zigzag_order.join(each, 1) if cp > 1 else each[0] for each in rows]))
    return found


def _join_tp(parts: list[Tensor], length: int | None) -> RankCopies:
    """The joined sequence, if the parts are shares of one of `length`; or one of equal copies; or all parts.

    The sequence comes first, because its shares may be equal, as zeros are. `length` is None without shares.
    """
    if length is not None and parts[0].dim() > 2 and sum(part.shape[1] for part in parts) == length:
        return [torch.cat(parts, 1)]
    if all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[:1]
    return parts


def distinct(own: dict[str, Tensor]) -> dict[str, RankCopies]:
    """The different values that ranks have of each tensor; all ranks call it, with the same names.

    Sends n - 1 times a table of names with a hash each, and n - 1 times the tensors that differ.
    """
    hashes = gather_values({name: hashlib.sha256(raw_bytes(value)).digest() for name, value in own.items()})
    found = {name: [value] for name, value in own.items()}
    for name in (name for name in own if len({each[name] for each in hashes}) > 1):
        copies = gather_values(own[name])
        found[name] = [*{each[name]: copy for each, copy in zip(hashes, copies, strict=True)}.values()]
    return found
