"""Put modules and functions back: their mode, and what a call has written to their attributes."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
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


def attributes_of(model: nn.Module) -> Callable[[], None]:
    """A function that gives a model the submodules, parameters, buffers, hooks and attributes of today."""
    stores = [part.__dict__ for part in model.modules()]
    stores += [each for store in stores for each in store.values() if isinstance(each, dict)]
    kept = [(store, dict(store)) for store in stores]

    def put_back() -> None:
        for store, before in kept:
            store.clear()
            store.update(before)

    return put_back


State = list[tuple[dict[str, Any], str, Any]]
"""Each tensor, number and None with the dict that has it, and its name there."""


def state_of(*objects: Any) -> State:
    """The buffers and plain attributes of modules and their parts, and the attributes of other objects.

    Only tensors, numbers and None count: a forward pass may change them. A method or a partial stands for its
    object.
    """
    return [
        (store, name, value)
        for store in stores_of(objects)
        for name, value in store.items()
        if isinstance(value, Tensor | int | float | None)
    ]


def computed(model: nn.Module) -> dict[int, Any]:
    """Replacements for attributes that copy.deepcopy refuses, such as pruned weights: its `memo`."""
    tensors = (x for _, _, x in state_of(model) if isinstance(x, Tensor) and x.grad_fn is not None)
    return {id(x): x.detach() for x in tensors}


def stores_of(objects: Iterable[Any]) -> list[dict[str, Any]]:
    """The dicts of attributes and buffers of modules and their parts, and of attributes of other objects."""
    behind = [getattr(getattr(each, "func", each), "__self__", each) for each in objects]
    parts = [part for each in behind for part in (each.modules() if isinstance(each, nn.Module) else [each])]
    found = [getattr(part, name, None) for part in parts for name in ("__dict__", "_buffers")]
    return [store for store in found if isinstance(store, dict)]


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


OF_MODULES = {*nn.Module().__dict__}
"""The attributes that torch keeps in every module."""


class KeptAttributes:
    """What modules, functions and other objects keep from one call to the next, to put it back.

    Objects keep it in attributes, and modules also in buffers. Functions keep it in variables of the function
    around them, in globals, and in the arguments of a partial. Tensors, numbers, None, iterators that count,
    and the items of lists and dicts are put back; a tensor's values only if it is an attribute or a buffer.
    """

    def __init__(self, *objects: Any) -> None:
        self._stores = [(store, {*store}) for store in stores_of(objects)]
        self._values: list[tuple[Callable[[Any], None], Any, Any]] = [
            (partial(store.__setitem__, name), store[name], copied(store[name]))
            for store, names in self._stores
            for name in names
            if is_kept(name, store[name])
        ]
        variables = [each for one in objects for each in _variables(one)]
        self._values += [(put, x, x if isinstance(x, Tensor) else copied(x)) for put, x in variables]

    def restore(self) -> None:
        """Give the objects the values that they had, and remove attributes that are new."""
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
            elif isinstance(value, Tensor):
                steps = zip(value.shape, value.stride(), strict=True)
                shares = any(size > 1 and not step for size, step in steps)  # a parameter of another stage
                if not shares and differs(value, old):
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
        yield from ((_stay, value) for value in owner.args if type(value) in (list, dict))
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


def _stay(value: Any) -> None:
    """Where nothing but a value's items can change."""


def cells_of(function: Any) -> list[CellType]:
    """The variables that a function shares with the function around it."""
    cells = getattr(getattr(function, "func", function), "__closure__", None) or ()
    return [cell for cell in cells if cell != CellType()]


def forwards(model: nn.Module) -> list[Any]:
    """The `forward` of each class of a model's parts but torch's."""
    kinds: set[Any] = {type(part) for part in model.modules()}
    return [kind.forward for kind in kinds if not kind.__module__.startswith("torch.")]


def plain_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Copies of what modules keep in attributes and buffers, by module and name."""
    return {
        (name, attribute): copied(value)
        for name, part in model.named_modules()
        for store in (part._buffers, part.__dict__)
        for attribute, value in store.items()
        if is_kept(attribute, value)
    }
