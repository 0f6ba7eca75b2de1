"""Where a layout's step differs from one process's by more than rounding explains."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.parallel.contract.batch import tensors
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.one_process import OneProcess, Outcome, TrainingState
from minidist.parallel.engine.whole_state import micro_batches, whole_batch
from minidist.parallel.sharding import residency
from minidist.parallel.training.moved_results import MARGIN, forward_hooks, move, moved_results

Outputs = dict[str, list[Tensor]]
"""The results of all calls of each module, by name, in the order in which modules finish."""
TRIALS = 2
"""How often the single process takes a step with moved results, to see what rounding explains."""
ROWS = (
    "One process computes the same as the layout if it takes the rows of ranks and micro-batches one after "
    "the other. So the loss, or the model, is no mean over rows. Let the loss return the mean over rows, or "
    "(mean, weight) with the number that it is a mean over, such as that of the tokens that are not ignored. "
    "What compares rows, such as a contrastive loss, has to gather those of all ranks. And the first "
    "dimension of a batch's tensors has to be its rows. Or the model or the loss keeps something from one "
    "micro-batch or rank to the next, as a counter or a running mean does"
)
OPTIMIZER = (
    "The gradients agree, and the update does not. So the optimizer looks at several parameters at once, as "
    "for a norm over all gradients, and each rank has only some. Use one that treats every parameter alone, "
    "or a layout in which each rank updates whole parameters: dp without zero"
)
STATE = (
    "The gradients agree, and the update does not. Either the model writes its parameters itself, or the "
    "optimizer keeps something outside its `state`, which the single process does not know: if that is all, "
    "rehearse=False is safe"
)
UNUSED = "It has a gradient in one of them, and in the other no loss has used it"
BUFFER = (
    "The model writes it in its forward pass, from the rows of one rank. Sum what it writes over the ranks "
    "with minidist.comm.all_reduce, give data_parallel={'broadcast_buffers': True} if rank 0's will do, "
    "or for BatchNorm batch_norm='synchronized'"
)
CUT = (
    "Between a 'column' layer and its 'row' layer each rank has only some of the features. Where the model "
    "reads several matrices from one, as in chunk(3) or chunk(2), give 'column_packed=3' or 2. Where it "
    "needs all of them, as for a softmax or a norm over features, give 'column_gathered' and 'row_split'. "
    "Where it counts heads, let it read their number from the features, as in unflatten(-1, (-1, "
    "head_size)), with head_size an attribute of the module. Ranks that share matrices pass the same rows"
)
PENALTY = (
    "The gradients agree. So a term over the model's parameters, such as their squares, sees only a rank's "
    "parts of them. Give the optimizer weight_decay instead, or compute the loss from the outputs alone"
)


def told(
    alone: OneProcess,
    layout: Layout,
    start: TrainingState,
    found: Outcome,
    scale: float,
    replicas: Sequence[str],
    outputs: Outputs,
) -> str:
    """How a layout's step differs from one process's, in sentences with a likely cause; "" if it does not.

    The gradients are compared, and the update from the layout's gradients. found: what the layout's step has
    computed from `start`. replicas: names of tensors of which ranks hold different copies. outputs: of the
    modules for this rank's rows, if they were recorded.
    """
    # One process, too, takes the batches of a list one after the other.
    of_all = zip_longest(*start.batches)
    batch = [joint for each in of_all for joint in whole_batch([pair for pair in each if pair])]
    trials = list[Outcome]()
    by_one = alone.step(start, batch, found.tensors, scale)
    first = difference(found, by_one, [])
    if first:
        for i in range(TRIALS):
            given = {n: move(n, x, i) for n, x in found.tensors.items() if n.startswith("gradient")}
            moved = partial(moved_results, trial=i, least=alone.last_bit)
            trials.append(alone.step(start, batch, given, scale, moved))
        first = difference(found, by_one, trials)
    if not first and replicas:
        name = replicas[0].partition(".")[2]
        first = Difference(replicas[0], f"{name} differs between the ranks that should hold the same")
    if not first:
        return ""
    cut = [[p for pair in own for p in micro_batches(pair, layout.micro_batches)] for own in start.batches]
    pieces = [piece for own in cut for piece in own]
    remedy = "minidist.compare shows the first layer that differs"
    name = first.name.removeprefix("model.")
    if name in start.trained:
        gradient = f"gradient.{name}"
        updates_all = residency.ROWS[layout.zero].state and layout.pp * layout.tp == 1  # on each rank
        remedy = STATE if updates_all else OPTIMIZER
        if (gradient in found.tensors) != (gradient in by_one.tensors):
            remedy = UNUSED
    elif first.name.startswith("model."):
        remedy = BUFFER
    elif len(pieces) > 1:
        alike = alone.step(start, pieces, found.tensors, scale)
        if not difference(found, alike, trials, kind="gradient"):
            remedy = ROWS if layout.micro_batches == 1 else f"{ROWS}. What gathers needs micro_batches=1"
    if layout.tp > 1 and not remedy.startswith((OPTIMIZER, UNUSED, BUFFER, ROWS)):
        whole: Outputs = defaultdict(list)
        alone.step(start, cut[0], found.tensors, scale, partial(recorded, into=whole))
        layer, of_loss = _first_output(whole, outputs), first.name == "the loss"
        remedy = PENALTY if of_loss and not layer else f"The plan makes another model{layer}. {CUT}"
    return (
        f"this layout, {layout}, trains otherwise than one process with the same weights and rows: "
        f"{first.text}. {remedy}. (prepare(rehearse=False) trains without this comparison.)"
    )


def recorded(model: nn.Module, into: Outputs) -> AbstractContextManager[None]:
    """Inside, keep the floating-point results of all modules."""

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        into[name] += [x.detach().clone() for _, x in tensors(output) if x.is_floating_point()]

    return forward_hooks(model.named_modules(), after)


def _first_output(whole: Outputs, cut: Outputs) -> str:
    """The first module whose output a plan has changed, in words. Outputs that are cut tell nothing."""
    for name, outputs in whole.items():
        for x, y in zip(outputs, cut.get(name, []), strict=False):
            far = _apart(x, y) if x.shape == y.shape else 0.0
            if not far <= math.sqrt(torch.finfo(x.dtype).eps) * _size(x):
                by = f"{far / (_size(x) or 1):.2g} of its size"
                return f": the output of {name or 'the model'} differs by {by}, and it is the first that does"
    return ""


def failed_layer(model: nn.Module, error: Exception) -> str | None:
    """The module in which an error was raised; "the model" for all of it, and None for no module."""
    names = {id(part): name or "the model" for name, part in model.named_modules()}
    owners = (id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((names[each] for each in reversed([*owners]) if each in names), None)


class Difference(NamedTuple):
    """The first thing that differs."""

    name: str  # "loss", "norm", or as in `Outcome.tensors`
    text: str


def difference(a: Outcome, b: Outcome, trials: Sequence[Outcome], kind: str = "") -> Difference | None:
    """The first difference between a layout's step and one process's that rounding does not explain.

    trials: the latter with moved results. kind: which tensors to compare, such as "gradient"; "" for all.
    """
    largest = max((_size(x) for name, x in b.tensors.items() if name.startswith("gradient")), default=0.0)
    least = max(b.bits.values(), default=0.0)
    first: Difference | None = None
    for name in b.tensors:
        if not name.startswith(kind):
            continue
        x, y = a.tensors.get(name), b.tensors[name]
        if x is None:
            x = torch.zeros_like(y)
        apart, size = _apart(x, y), _size(y)
        own = torch.finfo(y.dtype).eps if y.is_floating_point() or y.is_complex() else 0.0
        bits = b.bits.get(name, own)
        most = max((_apart(t.tensors[name], y) for t in trials if name in t.tensors), default=0.0)
        floor = bits * largest if name.startswith("gradient") else 0.0
        explained = MARGIN * max(most, bits * size, floor)
        if not apart <= explained:
            what = name.partition(".")[2]
            what = f"the gradient of {what}" if name.startswith("gradient") else what
            by = f"by {apart / size:.2g} of its size" if size else f"by {apart:.2g}"
            first = Difference(
                name, f"{what} differs {by}, {explained / (size or 1):.1g} of which rounding explains"
            )
            break
    for what, here, there, others in (
        ("the loss", a.loss, b.loss, [t.loss for t in trials]),
        ("the norm of the gradients", a.norm, b.norm, [t.norm for t in trials]),
    ):
        explained = MARGIN * max([2**-20 * abs(there), *(abs(each - there) for each in others)])
        explained = max(explained, least * abs(there))
        same = here == there or (math.isnan(here) and math.isnan(there))
        if not same and not abs(here - there) <= explained:
            also = f", and {first.text}" if first else ""
            return Difference(
                first.name if first else what, f"{what} is {here:.6g} and not {there:.6g}{also}"
            )
    return first


def _apart(x: Tensor, y: Tensor) -> float:
    """The largest difference of elements; infinite where one is not finite and the other is another."""
    if x.shape != y.shape:
        return torch.inf
    if not x.is_floating_point() or not y.is_floating_point():
        x, y = (torch.view_as_real(each.to(torch.complex128)) for each in (x, y))
    apart = float((x - y).abs().max()) if x.numel() else 0.0
    if math.isfinite(apart):
        return apart
    same = (x == y) | (x.isnan() & y.isnan())
    return float((x - y).abs().masked_fill(same, 0.0).nan_to_num(torch.inf, torch.inf).max())


def _size(x: Tensor) -> float:
    x = x if x.is_floating_point() else x.to(torch.complex128)
    size = float(x.abs().max()) if x.numel() else 0.0
    return size if math.isfinite(size) else float(x.abs().nan_to_num(0, 0).max())


def options_differ(alone: list[dict[str, Any]], layout: list[dict[str, Any]]) -> str:
    """The first option that a parameter has otherwise than in one process, in words."""
    of_layout = {name: group for group in layout for name in group["params"]}
    for group in alone:
        for name in group["params"]:
            other: Mapping[str, Any] = of_layout.get(name, {})
            if not other:
                return f"the optimizer has {name} there, and not here"
            for key in group.keys() - {"params"}:
                x, y = group[key], other.get(key)
                same = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
                if not same:
                    return f"the optimizer's {key} for {name} is {x!r} there, and {y!r} here"
    known = {name for group in alone for name in group["params"]}
    extra = next((name for name in of_layout if name not in known), "")
    return f"the optimizer has {extra} here, and not there" if extra else ""
