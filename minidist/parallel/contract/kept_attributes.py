"""Put modules and functions back: their mode, and what a call has written to their attributes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put all parts of these modules in evaluation mode without gradients; afterwards each as it was."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()  # which a module may have overridden
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


State = list[tuple[dict[str, Any], str, Any]]
"""Each tensor, number and None with the dict that has it, and its name there."""


def state_of(*owners: Any) -> State:
    """The buffers and plain attributes of modules and their parts, and the attributes of other objects.

    Only tensors, numbers and None count: a forward pass may change them. A method or a partial stands for its
    object.
    """
    return [
        (store, name, value)
        for store in stores_of(owners)
        for name, value in store.items()
        if isinstance(value, Tensor | int | float | None)
    ]


def computed(model: nn.Module) -> dict[int, Any]:
    """Replacements for attributes that copy.deepcopy refuses, such as pruned weights: its `memo`."""
    tensors = (x for _, _, x in state_of(model) if isinstance(x, Tensor) and x.grad_fn is not None)
    return {id(x): x.detach() for x in tensors}


OF_MODULES = {*nn.Module().__dict__}
"""The attributes that torch keeps in every module."""


def cells_of(*owners: Any) -> list[Any]:
    """The variables that functions share with the function around them."""
    cells = [
        cell for each in owners for cell in getattr(getattr(each, "func", each), "__closure__", None) or ()
    ]
    return [cell for cell in cells if cell != CellType()]


def forwards(model: nn.Module) -> list[Any]:
    """The `forward` of each class of a model's parts but torch's."""
    kinds: set[Any] = {type(part) for part in model.modules()}
    return [kind.forward for kind in kinds if not kind.__module__.startswith("torch.")]


def _named(owner: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where functions keep state: globals that they, or a model's `forward`, name; a partial's arguments."""
    while isinstance(owner, partial):
        yield from ((owner.keywords, name) for name in owner.keywords)
        owner = owner.func
    functions = forwards(owner) if isinstance(owner, nn.Module) else [getattr(owner, "__func__", owner)]
    for function in functions:
        codes = [getattr(function, "__code__", None)]
        for code in codes:  # a function inside it is one of its constants
            codes += [each for each in code.co_consts if isinstance(each, CodeType)] if code else []
        names = {name for code in codes if code for name in code.co_names}
        known = getattr(function, "__globals__", {})
        yield from ((known, name) for name in names if name in known)


def stores_of(owners: Iterable[Any]) -> list[dict[str, Any]]:
    """The dicts of attributes and buffers of modules and their parts, and of attributes of other objects."""
    objects = [getattr(getattr(each, "func", each), "__self__", each) for each in owners]
    parts = [part for each in objects for part in (each.modules() if isinstance(each, nn.Module) else [each])]
    found = [getattr(part, name, None) for part in parts for name in ("__dict__", "_buffers")]
    return [store for store in found if isinstance(store, dict)]


_COPIED = int, float, itertools.count
"""A global of these types is put back as a copy. Lists and dicts get their items back."""


class KeptAttributes:
    """The state of modules and other objects (`state_of`) as it is now, to put back."""

    def __init__(self, *owners: Any) -> None:
        self._stores, self._state = stores_of(owners), state_of(*owners)
        self._names = [{*store} for store in self._stores]
        self._cells = [(cell, cell.cell_contents) for cell in cells_of(*owners)]
        named = [(store, name, store[name]) for owner in owners for store, name in _named(owner)]
        self._named = [(store, name, copy.copy(x)) for store, name, x in named if isinstance(x, _COPIED)]
        values = [value for store in self._stores for name, value in store.items() if name not in OF_MODULES]
        values += [value for _, value in self._cells] + [value for *_, value in named]
        self._containers = [(value, copy.copy(value)) for value in values if type(value) in (list, dict)]
        self._before = [v.detach().clone() if isinstance(v, Tensor) else v for _, _, v in self._state]

    def restore(self) -> None:
        """Give the objects the state that they had; remove what is new; give lists and dicts their items."""
        for cell, content in self._cells:
            cell.cell_contents = content
        for store, name, value in self._named:
            store[name] = copy.copy(value)
        for container, items in self._containers:
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)
        for store, known in zip(self._stores, self._names, strict=True):
            for name in {*store} - known:
                if isinstance(store[name], Tensor | int | float | None):
                    del store[name]
        for (store, name, value), old in zip(self._state, self._before, strict=True):
            store[name] = value
            if isinstance(value, Tensor) and differs(value, old) and not _is_expanded(value):
                value.data.copy_(old)


def _is_expanded(x: Tensor) -> bool:
    """Whether elements share memory, as those of a pipeline's stand-ins for other stages' parameters."""
    return any(size > 1 and not step for size, step in zip(x.shape, x.stride(), strict=True))


@contextmanager
def unchanged(*owners: Any) -> Iterator[None]:
    """Restore the state of modules and other objects at the end of the block."""
    kept = KeptAttributes(*owners)
    try:
        yield
    finally:
        kept.restore()


def differs(value: Any, old: Any) -> bool:
    """Whether a tensor's values, or a list's or dict's items, have changed, or it is another object."""
    if type(value) is type(old) is list:
        return len(value) != len(old) or any(x is not y for x, y in zip(value, old, strict=True))
    if type(value) is type(old) is dict:
        return value.keys() != old.keys() or any(value[key] is not old[key] for key in value)
    if not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return value is not old
    try:
        return not torch.equal(value, old)
    except RuntimeError:  # a dry run has no values, and sparse tensors are not compared
        return False
