"""`compare`: the first layer at which two layouts differ by more than rounding explains.

A loss that is slightly off says that something is wrong, but not where. Here both layouts train on the same
batches from the same weights. The layers' outputs, their gradients and the parameters' updates are compared
in the order in which they are computed. Look at the first one that differs by more than rounding changes it
(recording.py): everything that is computed from it differs as a consequence.

>>> print(md.compare(engine_a, engine_b, batches))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from minidist.parallel.debugging.recording import REPEATS, RankCopies, Recording, batches_of, distance, record
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.training.comparable_steps import MARGIN, magnitude


@dataclass(frozen=True)
class Difference:
    """A tensor in which two layouts differ."""

    step: int  # counted from 1; 0 before the first
    layer: str | None  # "layers.2", which computed it; None for the loss and for what is outside the layers
    what: str  # in words: "its output"
    difference: float  # the largest difference of elements, over the tensor's largest magnitude
    explained: float  # the difference that rounding explains, in the same unit

    def __str__(self) -> str:
        """Where and by how much they differ, in a sentence."""
        where = self.layer or "the model"
        when = f"in step {self.step}" if self.step else "before the first step"
        by = f"by {self.difference:.2g} of its size"
        if math.isinf(self.difference):
            by = "in its shape, or one of them lacks it or is not finite there"
        return f"{where}: {self.what} differs {when}, {by}; rounding explains {self.explained:.2g}"


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two recordings."""

    a: str  # the layouts
    b: str
    steps: int
    tensors: int  # how many were compared
    differences: tuple[Difference, ...]  # beyond rounding, in the order of computation
    closest: float  # the largest difference of a tensor that agrees, over what rounding explains

    @property
    def agree(self) -> bool:
        """Whether rounding explains every difference."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference; the others may be its consequences."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        """The result in a few lines."""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        compared = f"{self.a} and {self.b}, {steps}, {self.tensors} tensors"
        why = (
            f"Rounding explains {MARGIN} times what changes where every module's results, forward and "
            "backward, are moved by their last bit"
        )
        if self.first is None:
            return f"{compared}: they agree.\n{why}; the largest difference is {self.closest:.0%} of that."
        others = len(self.differences) - 1
        also = f"\n{others} more that are computed later differ, too." if others else ""
        return f"{compared}: they differ.\nFirst {self.first}.{also}\n{why}."


def compare(
    engine_a: Engine,
    engine_b: Engine,
    batches: Iterable[Any],
    repeats: int = REPEATS,
) -> Comparison:
    """Train two engines on the same ranks with the same batches, and compare them; all ranks call it.

    Both are restored afterwards, as by `record`. To compare layouts with different numbers of ranks, `record`
    each in its own launch and call `differences`, or use the command `minidist compare`. Adam and other
    optimizers that divide a gradient by its size hide a wrongly scaled gradient from the updates;
    `torch.optim.SGD` shows it.

    Args:
        engine_a, engine_b: from `prepare`, with equal weights.
        batches: whole global batches, the same on all ranks; see `record`.
        repeats: how often to measure the effect of rounding.

    Raises:
        TypeError, ValueError: as for `record`; or the models have different layers or parameters.
    """
    given = batches_of(batches)
    return differences(record(engine_a, given, repeats), record(engine_b, given, repeats))


def differences(a: Recording, b: Recording) -> Comparison:
    """Compare the recordings of two layouts on the same batches.

    Raises:
        TypeError: one is not a recording.
        ValueError: their numbers of steps, or their models' layers or parameters, differ.
    """
    for name, recording in (("a", a), ("b", b)):
        if not isinstance(recording, Recording):
            raise TypeError(f"{name} is a {type(recording).__name__}; give what `record` returned")
    if len(a.steps) != len(b.steps):
        raise ValueError(
            f"{a.layout} took {len(a.steps)} steps and {b.layout} {len(b.steps)}; give both one number"
        )
    if sorted(a.layers) != sorted(b.layers) or a.start.keys() != b.start.keys():
        raise ValueError(
            f"{a.layout} and {b.layout} train models of other layers or parameters; give both the same"
        )
    found, closest, tensors = list[Difference](), 0.0, 0
    for step, layer, what, x, y, rounding, whole in _pairs(a, b):
        tensors += 1
        size = magnitude(*x, *y)
        # A tensor that depends on no moved result still rounds once; an update is a difference of parameters.
        bits = max(torch.finfo(copy.dtype).eps for copy in (*x, *y))
        explained = MARGIN * max(rounding, bits * size) + bits * whole
        far = distance(x, y) if x and y else math.inf
        if far > explained or not (x and y):
            found.append(
                Difference(step, layer, what, *(each / size if size else each for each in (far, explained)))
            )
        elif explained:
            closest = max(closest, far / explained)
    return Comparison(a.layout, b.layout, len(a.steps), tensors, tuple(found), closest)


_Pair = tuple[int, str | None, str, RankCopies, RankCopies, float, float]
"""A tensor of both layouts: step, layer that computed it, description, both values (empty if not recorded),
the change when results were moved, and for an update the size of the parameter."""


def _pairs(a: Recording, b: Recording) -> Iterator[_Pair]:
    """The tensors to compare, in the order in which they are computed."""
    for name in a.start:
        yield 0, _layer_of(name, a.layers), f"its {name}", [a.start[name]], [b.start[name]], 0.0, 0.0
    for number, (x, y) in enumerate(zip(a.steps, b.steps, strict=True)):
        for key, layer, what in _order(a.layers, a.first_names):
            if key in x or key in y:
                rounding = max(each.rounding[number].get(key, 0.0) for each in (a, b))
                kind, _, name = key.partition(" ")
                whole = magnitude(a.start[name]) if kind == "update" else 0.0
                yield number + 1, layer, what, x.get(key, []), y.get(key, []), rounding, whole


def _order(layers: list[str], first_names: dict[str, str]) -> Iterator[tuple[str, str | None, str]]:
    """Keys of a recording, with the layer that computes each and a description: forward, then backward."""
    updates: dict[str | None, list[tuple[str, str]]] = {}
    for name, first in first_names.items():
        # The gradient of a tied parameter is complete once the first of its layers has added its part.
        what = f"the update of {name}" + (f", tied to {first}," if first != name else "")
        updates.setdefault(_layer_of(first, layers), []).append((f"update {name}", what))
    for layer in layers:
        yield f"output {layer}", layer, "its output"
    for number, layer in reversed([*enumerate(layers)]):
        if number == len(layers) - 1:
            yield f"gradient {layer}", None, "the loss's gradient"
        for key, what in updates.get(layer, []):
            yield key, layer, what
        if number:
            yield f"gradient {layers[number - 1]}", layer, "the gradient of its input"
    for key, what in updates.get(None, []):
        yield key, None, what


def _layer_of(parameter: str, layers: list[str]) -> str | None:
    return next((layer for layer in layers if parameter.startswith(layer + ".")), None)
