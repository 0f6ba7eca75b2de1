"""Where a layout's step differs from one process's by more than rounding explains, and the likely cause."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.parallel.contract.batch import tensors, to_device
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.one_process import OneProcess, Outcome
from minidist.parallel.engine.whole_state import TrainingState, micro_batches, whole_batch
from minidist.parallel.training.comparable_steps import (
    MARGIN,
    apart,
    forward_hooks,
    magnitude,
    move,
    moved_results,
)

Outputs = dict[str, list[Tensor]]
"""The results of all calls of each module, by name, in the order in which modules finish."""
TRIALS = 2
"""How often the single process takes a step with moved results, to see what rounding explains."""

# Likely causes, and what to do about them.
NO_MEAN = (
    "The loss, or the model, is no mean over rows: one process gets the layout's result if it takes the rows "
    "of ranks and micro-batches one after the other. Let the loss return the mean over rows, or "
    "(mean, weight) with the number that it is a mean over, such as that of the tokens that are not ignored. "
    "A loss that compares rows, such as a contrastive one, has to gather those of all ranks, with "
    "micro_batches=1. The first dimension of a batch's tensors has to be its rows. And neither model nor "
    "loss may keep something from one micro-batch or rank to the next, such as a counter or a running mean"
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
UNUSED = "has a gradient in one of them, and in the other no loss has used it"
BUFFER = (
    "is written in the model's forward pass, from the rows of one rank. Sum what it writes over the ranks "
    "with minidist.comm.all_reduce, give data_parallel={'broadcast_buffers': True} if rank 0's will do, "
    "or for BatchNorm batch_norm='synchronized'"
)
CUT = (
    "Between a 'column' layer and its 'row' layer each rank has only some of the features. Where the model "
    "reads several matrices from one, as in chunk(3) or chunk(2), give 'column_packed=3' or 2. Where it "
    "needs all of them, as for a softmax or a norm over features, give 'column_gathered' and 'row_split'. "
    "Where it counts heads, let it read their number from the features, as in unflatten(-1, (-1, "
    "head_size)), with head_size an attribute of the module"
)
PENALTY = (
    "The gradients agree. So a term over the model's parameters, such as their squares, sees only a rank's "
    "parts of them. Give the optimizer weight_decay instead, or compute the loss from the outputs alone"
)
UNEQUAL = (
    "the ranks' rows have different lengths, and no padding shows how one process would join them: whether "
    "the loss is a mean over rows is not known"
)


def compared(
    alone: OneProcess,
    layout: Layout,
    start: TrainingState,
    found: Outcome,
    scale: float,
    replicas: Sequence[str],
    outputs: Outputs,
) -> tuple[str, str]:
    """The likely cause if a layout's step differs from one process's; and why that cannot be told, if so.

    The gradients are compared, and the update from the layout's gradients. found: what the layout's step has
    computed from `start`. replicas: names of tensors of which ranks hold different copies. outputs: of the
    modules for this rank's rows, if they were recorded.
    """
    own = [part.batches for number, part in enumerate(start.parts) if part.batches or not number]
    ranks = [[to_device(batch, alone.device) for batch in batches] for batches in own]
    # One process, too, takes the batches of a list one after the other.
    joint = [whole_batch([each for each in batches if each]) for batches in zip_longest(*ranks)]
    batch = [one for batches, _ in joint for one in batches]
    take, trials = partial(alone.step, start), list[Outcome]()
    by_one = take(batch, found.tensors, scale)
    first = difference(found, by_one, [])
    if first:
        by_one = take(batch, found.tensors, scale, True)
        for i in range(TRIALS):
            given = {n: move(n, x, i) for n, x in found.tensors.items() if n.startswith("gradient")}
            inside = partial(moved_results, trial=i, least=alone.last_bit)
            trials.append(take(batch, given, scale, True, inside))
        first = difference(found, by_one, trials)
    if not first and replicas:
        name = replicas[0].partition(".")[2]
        first = Difference(replicas[0], f"{name} differs between the ranks that should hold the same")
    if not all(is_known for _, is_known in joint):
        return "", f"{UNEQUAL}. Rank by rank, {first.text}" if first else UNEQUAL
    if not first:
        return "", ""

    cut = [[part for each in own for part in micro_batches(each, layout.micro_batches)] for own in ranks]
    pieces = [piece for own in cut for piece in own]
    kind, _, name = first.name.partition(".")
    cause = "minidist.compare shows the first layer that differs"
    if kind == "model" and any(name in part.trained for part in start.parts):
        whole_state = layout.residency.whole_state and layout.pp * layout.tp == 1  # all on each rank
        cause = STATE if whole_state else OPTIMIZER
        if (f"gradient.{name}" in found.tensors) != (f"gradient.{name}" in by_one.tensors):
            cause = f"{name} {UNUSED}"
    elif kind == "model":
        cause = f"{name} {BUFFER}"
    elif len(pieces) > 1 and not difference(found, take(pieces, found.tensors, scale, True), trials, False):
        cause = NO_MEAN
    elif layout.tp > 1:
        whole: Outputs = defaultdict(list)
        take(cut[0], found.tensors, scale, True, partial(recorded, into=whole))
        layer = _first_output(whole, outputs)
        cause = PENALTY if kind == "loss" and not layer else f"The plan makes another model{layer}. {CUT}"
    return f"{cause}. What differs: {first.text}", ""


def recorded(model: nn.Module, into: Outputs) -> AbstractContextManager[None]:
    """Inside, keep the floating-point results of all modules."""

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        into[name] += [x.detach().clone() for _, x in tensors(output) if x.is_floating_point()]

    return forward_hooks(model.named_modules(), after)


def _first_output(whole: Outputs, cut: Outputs) -> str:
    """The first module whose output a plan has changed, in words. Outputs that are cut tell nothing."""
    for name, outputs in whole.items():
        for x, y in zip(outputs, cut.get(name, []), strict=False):
            far = apart(x, y) if x.shape == y.shape else 0.0
            if not far <= math.sqrt(torch.finfo(x.dtype).eps) * magnitude(x):
                by = f"{far / (magnitude(x) or 1):.2g} of its size"
                return f": the output of {name or 'the model'} differs by {by}, and it is the first that does"
    return ""


def failed_layer(model: nn.Module, error: BaseException) -> str | None:
    """The module in which an error was raised; "the model" for all of it, and None for no module."""
    names = {id(part): name or "the model" for name, part in model.named_modules()}
    called = (id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((names[each] for each in reversed([*called]) if each in names), None)


class Difference(NamedTuple):
    """What differs first."""

    name: str  # as in `Outcome.tensors`: of a tensor, if any differs, or else the loss or the norm
    text: str


def difference(a: Outcome, b: Outcome, trials: Sequence[Outcome], update: bool = True) -> Difference | None:
    """The first differences between a layout's step and one process's that rounding does not explain.

    trials: one process's step with moved results. update: whether to compare what the step wrote as well.
    """
    sizes = {name: magnitude(x) for name, x in b.tensors.items()}
    largest = max((size for name, size in sizes.items() if name.startswith("gradient")), default=0.0)
    found: list[Difference] = []
    for name, y in b.tensors.items():
        kind, _, of = name.partition(".")
        if kind == "model" and not update:
            break
        x, size = a.tensors[name] if name in a.tensors else torch.zeros_like(y), sizes[name]
        own = torch.finfo(y.dtype).eps if y.is_floating_point() or y.is_complex() else 0.0
        least = b.bits.get(name, own) * (largest if kind == "gradient" else size)
        of_trials = (apart(trial.tensors[name], y) for trial in trials if name in trial.tensors)
        far, explained = apart(x, y), MARGIN * max(least, *of_trials, 0.0)
        if far <= explained:
            continue
        if not of:
            what = "the loss" if kind == "loss" else "the norm of the gradients"
            found.append(Difference(name, f"{what} is {float(x):.6g} and not {float(y):.6g}"))
            continue
        what = f"the gradient of {of}" if kind == "gradient" else of
        by = f"{far / size:.2g} of its size" if size else f"{far:.2g}"
        of_rounding = f"{explained / (size or 1):.1g} of which rounding explains"
        found.append(Difference(name, f"{what} differs by {by}, {of_rounding}"))
        break
    return Difference(found[-1].name, ", and ".join(each.text for each in found)) if found else None


def options_differ(alone: list[dict[str, Any]], layout: list[dict[str, Any]]) -> str:
    """Describe the first option of a parameter that differs from one process's; "" if none does."""

    def options(groups: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
        return {
            (name, key): value
            for group in groups
            for name in group["params"]
            for key, value in group.items()
            if key != "params"
        }

    there, here = options(alone), options(layout)
    keys = {key for _, key in there}
    for name, key in (each for each in there | here if each[1] in keys):
        x, y = there.get((name, key), "nothing"), here.get((name, key), "nothing")
        if not (torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y):
            return f"the optimizer's {key} for {name} is {y!r} here and {x!r} in one process"
    return ""
