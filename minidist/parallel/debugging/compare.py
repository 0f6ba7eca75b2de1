"""Do two layouts train alike? The first layer at which they part is named, with what rounding explains.

A loss that is a little off says that something is wrong, and not where. Both layouts take the same batches
from the same weights; outputs of the layers, their gradients and the parameters' updates are compared in the
order in which they are computed. Whatever differs first by more than rounding moves it (recording.py) is
where to look: what follows from it differs, too.

>>> print(md.compare(engine_a, engine_b, batches))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.parallel.contract.engine import Engine
from minidist.parallel.debugging.assembling import RankCopies, distance
from minidist.parallel.debugging.recording import REPEATS, Recording, pairs_of, record

MARGIN = 16
"""What rounding explains is so many times what the last bits' moving changed. Layouts that train alike differ
by up to four times that: sums in another order round many times where a result moves once, and of few random
trials none need be the worst. A wrong gradient differs by thousands, but in 16 bits."""


@dataclass(frozen=True)
class Difference:
    """A tensor that two layouts do not agree about."""

    step: int  # counted from 1; 0 before the first
    layer: str | None  # "layers.2", which computed it; None for the loss and what is outside of the layers
    what: str  # in words: "its output"
    difference: float  # of the elements that differ most, over the tensor's largest magnitude
    explained: float  # what rounding explains, in the same terms

    def __str__(self) -> str:
        """A sentence."""
        where = self.layer or "the model"
        when = f"in step {self.step}" if self.step else "before the first step"
        by = f"by {self.difference:.2g} of its size"
        if math.isinf(self.difference):
            by = "in its shape, or one of them lacks it or is not finite there"
        return f"{where}: {self.what} differs {when}, {by}; rounding explains {self.explained:.2g}"


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two recordings."""

    a: str  # the layouts
    b: str
    steps: int
    tensors: int  # compared
    differences: tuple[Difference, ...]  # beyond rounding, in the order in which they were computed
    closest: float  # the largest difference of a tensor that agrees, over what rounding explains

    @property
    def agree(self) -> bool:
        """Whether rounding explains all."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference, from which the others may follow."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        """What a person wants to know, in a few lines."""
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
    batches: Iterable[tuple[Tensor, Tensor]],
    repeats: int = REPEATS,
) -> Comparison:
    """Take both engines, on the same ranks, through the same batches, and compare; all ranks call it.

    Both are left as they were, see `record`. For layouts with other numbers of ranks: `record` in a launch
    each, then `differences`; or the command `minidist compare`. An optimizer that divides a gradient by its
    size, such as Adam, hides a gradient that is scaled from the updates: `torch.optim.SGD` shows it.

    Args:
        engine_a, engine_b: of `prepare`, with equal weights.
        batches: inputs and targets of whole global batches, the same on all ranks.
        repeats: how often to measure what rounding moves.

    Raises:
        TypeError, ValueError: as `record` does; or the models have other layers or parameters.
    """
    given = pairs_of(batches)
    return differences(record(engine_a, given, repeats), record(engine_b, given, repeats))


def differences(a: Recording, b: Recording) -> Comparison:
    """Compare what `record` saw of two layouts on the same batches.

    Raises:
        TypeError: one is no recording.
        ValueError: they took other numbers of steps, or their models have other layers or parameters.
    """
    for name, recording in (("a", a), ("b", b)):
        if not isinstance(recording, Recording):
            raise TypeError(f"{name} is a {type(recording).__name__}; give what `record` returned")
    if len(a.steps) != len(b.steps):
        raise ValueError(
            f"{a.layout} took {len(a.steps)} steps and {b.layout} {len(b.steps)}; give both one number"
        )
    if a.layers != b.layers or a.start.keys() != b.start.keys():
        raise ValueError(
            f"{a.layout} and {b.layout} train models of other layers or parameters; give both the same"
        )
    found, closest, tensors = list[Difference](), 0.0, 0
    for step, layer, what, x, y, rounding, whole in _pairs(a, b):
        tensors += 1
        size = _size(*x, *y)
        # What no moved result goes into is rounded, too, once; and an update is a difference of parameters.
        bits = max(torch.finfo(copy.dtype).eps for copy in (*x, *y))
        explained = MARGIN * max(rounding, bits * size) + bits * whole
        apart = distance(x, y) if x and y else math.inf
        if apart > explained or not (x and y):
            found.append(
                Difference(step, layer, what, *(each / size if size else each for each in (apart, explained)))
            )
        elif explained:
            closest = max(closest, apart / explained)
    return Comparison(a.layout, b.layout, len(a.steps), tensors, tuple(found), closest)


class _Pair(NamedTuple):
    """A tensor of both layouts."""

    step: int
    layer: str | None  # that computed it
    what: str
    a: RankCopies  # none where it was not seen
    b: RankCopies
    rounding: float  # what moving results changed
    whole: float  # the size of the parameter that it is an update of


def _pairs(a: Recording, b: Recording) -> Iterator[_Pair]:
    """What is compared, in the order in which it is computed."""
    for name in a.start:
        yield _Pair(0, _layer_of(name, a.layers), f"its {name}", [a.start[name]], [b.start[name]], 0.0, 0.0)
    for number, (x, y) in enumerate(zip(a.steps, b.steps, strict=True)):
        for key, layer, what in _order(a.layers, _first_names(a)):
            if key in x or key in y:
                rounding = max(each.rounding[number].get(key, 0.0) for each in (a, b))
                kind, _, name = key.partition(" ")
                whole = _size(a.start[name]) if kind == "update" else 0.0
                yield _Pair(number + 1, layer, what, x.get(key, []), y.get(key, []), rounding, whole)


def _order(layers: list[str], first_names: dict[str, str]) -> Iterator[tuple[str, str | None, str]]:
    """Keys of a recording with the layers that compute them, and words: forward, then backward."""
    updates: dict[str | None, list[tuple[str, str]]] = {}
    for name, first in first_names.items():
        # The gradient of a tied parameter is complete when the first of its layers has added its part.
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


def _first_names(a: Recording) -> dict[str, str]:
    """For each parameter the first that always was equal to it: itself, or what it is tied to."""
    values = {name: [a.start[name], *(step[f"update {name}"][0] for step in a.steps)] for name in a.start}
    found: dict[str, str] = {}
    for name, value in values.items():
        trained = any(update.count_nonzero() for update in value[1:])
        same = (
            first
            for first in dict.fromkeys(found.values())
            if trained and all(map(torch.equal, value, values[first]))
        )
        found[name] = next(same, name)
    return found


def _layer_of(parameter: str, layers: list[str]) -> str | None:
    return next((layer for layer in layers if parameter.startswith(layer + ".")), None)


def _size(*tensors: Tensor) -> float:
    """The largest magnitude of a finite element."""
    return max(float(x.double().abs().nan_to_num(0, 0).max()) if x.numel() else 0.0 for x in tensors)
