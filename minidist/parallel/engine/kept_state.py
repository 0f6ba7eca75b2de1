"""`KeptState`: an engine's state as it is now, to put back after a step that was only a trial.

The engine's tensors and settings are restored as a checkpoint restores them. What Python code keeps from one
call to the next, such as a counter in a loss, is in no checkpoint: `KeptAttributes` puts that back.
"""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidist.parallel.contract.kept_attributes import differs, stores_of
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.ranges import narrowed


class KeptState:
    """A copy of an engine's state, of what its model and loss keep, and of the random states.

    It leaves out what gradient compression holds: `restore` drops that, and PowerSGD's factors stay.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings, self.norm = engine, engine.settings(), engine.grad_norm
        self.of_strategy = copy.deepcopy(engine.strategy.settings())
        self.boxes: dict[str, list[TensorBox]] = defaultdict(list)
        for box in engine.strategy.state_boxes():
            self.boxes[box.name].append(box._replace(tensor=box.tensor.clone()))
        self.attributes = KeptAttributes(engine.model, engine.loss)
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self.on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def draws_elsewhere(self) -> str:
        """The generator other than torch's that has drawn since, if any."""
        if random.getstate() != self.random[0]:
            return "Python's"
        now = np.random.get_state()  # noqa: NPY002
        same = all(np.array_equal(a, b) for a, b in zip(now, self.random[1], strict=True))
        return "" if same else "NumPy's"

    def restore(self) -> None:
        """Restore the engine, as loading a checkpoint would; an optimizer that has not run gets no state."""
        strategy = self.engine.strategy
        kinds = ((name, box.shape, box.tensor.dtype) for name, (box, *_) in self.boxes.items())
        strategy.load_settings(copy.deepcopy(self.of_strategy), state_kinds(kinds))
        strategy.drop()
        for box in strategy.state_boxes():
            for kept in self.boxes[box.name]:
                _copy_common(kept, box)
        strategy.loaded()
        self.engine.load_settings(self.settings)
        self.engine.grad_norm = self.norm
        self.attributes.restore()
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])  # noqa: NPY002
        torch.set_rng_state(self.random[2])
        if self.on_gpu is not None:
            torch.cuda.set_rng_state(self.on_gpu)


def state_kinds(tensors: Iterable[tuple[str, Any, torch.dtype]]) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Shape and dtype of an optimizer's state by parameter and key, from those of "optimizer.NAME.KEY"."""
    found: dict[str, dict[str, tuple[Any, Any]]] = defaultdict(dict)
    for full, *kind in tensors:
        if full.startswith("optimizer."):
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            found[name][key] = kind[0], kind[1]
    return found


def _copy_common(source: TensorBox, target: TensorBox) -> None:
    """Copy the elements that two boxes have in common: the first step may have moved the boxes."""
    first = [max(each) for each in zip(source.offsets, target.offsets, strict=True)]
    ends = ((o + n for o, n in zip(c.offsets, c.tensor.shape, strict=True)) for c in (source, target))
    sizes = [min(each) - start for start, *each in zip(first, *ends, strict=True)]
    if all(size > 0 for size in sizes):
        there, here = (
            narrowed(box.tensor, [a - b for a, b in zip(first, box.offsets, strict=True)], sizes)
            for box in (target, source)
        )
        there.copy_(here)


OF_MODULES = {*nn.Module().__dict__}
"""The attributes that torch keeps in every module."""


class KeptAttributes:
    """What modules, functions and other objects keep from one call to the next, to put it back.

    Objects keep it in attributes, and modules also in buffers. Functions keep it in variables of the function
    around them, in globals, and in the arguments of a partial. Tensors, numbers, None, iterators that count,
    and the items of lists and dicts are put back; a tensor's values only if it is an attribute or a buffer.
    """

    def __init__(self, *owners: Any) -> None:
        self._stores = [(store, {*store}) for store in stores_of(owners)]
        self._values: list[tuple[Callable[[Any], None], Any, Any]] = [
            (partial(store.__setitem__, name), store[name], copied(store[name]))
            for store, names in self._stores
            for name in names
            if is_kept(name, store[name])
        ]
        variables = [each for owner in owners for each in _variables(owner)]
        self._values += [(put, x, x if isinstance(x, Tensor) else copied(x)) for put, x in variables]

    def restore(self) -> None:
        """Give the owners the values that they had, and remove attributes that are new."""
        for store, known in self._stores:
            for name in {*store} - known:
                if is_kept(name, store[name]):
                    del store[name]
        for put, value, old in self._values:
            put(copied(old) if isinstance(old, itertools.count) else value)
            if old is value:
                continue
            if isinstance(value, list):
                value[:] = old
            elif isinstance(value, dict):
                value.clear()
                value.update(old)
            elif isinstance(value, Tensor) and differs(value, old) and not _is_expanded(value):
                value.data.copy_(old)


def is_kept(name: str, value: Any) -> bool:
    """Whether a module or a function may keep something in an attribute or a variable of this name."""
    if type(value) in (list, dict):
        return name not in OF_MODULES
    return isinstance(value, Tensor | int | float | itertools.count | None)


def copied(value: Any) -> Any:
    """A copy of a tensor, a list, a dict or a counting iterator; everything else as it is."""
    if isinstance(value, itertools.count):
        start = ast.literal_eval(repr(value).removeprefix("count"))  # Python 3.14 copies no iterators
        return itertools.count(*start) if isinstance(start, tuple) else itertools.count(start)
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in (list, dict) else value


def _variables(owner: Any) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """What a function, or the `forward`s of a model, may write: a function that sets it, and its value."""
    stores: list[tuple[dict[str, Any], set[str]]] = []
    while isinstance(owner, partial):
        stores.append((owner.keywords, {*owner.keywords}))
        owner = owner.func
    for function in forwards(owner) if isinstance(owner, nn.Module) else [getattr(owner, "__func__", owner)]:
        for cell in cells_of(function):
            yield partial(setattr, cell, "cell_contents"), cell.cell_contents
        codes = [getattr(function, "__code__", None)]
        for code in codes:  # a function inside it is one of its constants
            codes += [each for each in code.co_consts if isinstance(each, CodeType)] if code else []
        names = {name for code in codes if code for name in code.co_names}
        stores.append((getattr(function, "__globals__", {}), names))
    for store, names in stores:
        for name in names & store.keys():
            if is_kept(name, store[name]):
                yield partial(store.__setitem__, name), store[name]


def cells_of(function: Any) -> list[CellType]:
    """The variables that a function shares with the function around it."""
    cells = getattr(getattr(function, "func", function), "__closure__", None) or ()
    return [cell for cell in cells if cell != CellType()]


def forwards(model: nn.Module) -> list[Any]:
    """The `forward` of each class of a model's parts but torch's."""
    kinds: set[Any] = {type(part) for part in model.modules()}
    return [kind.forward for kind in kinds if not kind.__module__.startswith("torch.")]


def _is_expanded(x: Tensor) -> bool:
    """Whether elements share memory, as those of a pipeline's stand-ins for other stages' parameters."""
    return any(size > 1 and not step for size, step in zip(x.shape, x.stride(), strict=True))


def plain_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Copies of what modules keep in attributes and buffers, by module and name."""
    return {
        (name, attribute): copied(value)
        for name, part in model.named_modules()
        for store in (part._buffers, part.__dict__)
        for attribute, value in store.items()
        if is_kept(attribute, value)
    }
