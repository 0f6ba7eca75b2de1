"""An engine's arguments that are functions; and calls of a model that leave no trace in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[..., Any]
"""From outputs and targets to a scalar, their mean over rows, or to a pair (mean, weight). Or one from the
model and a batch to either, whose first argument is called `model`."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to a torch optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`."""
MakeFromNamed = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""From (name, parameter) pairs to a torch optimizer; its first argument is called `named_parameters`."""


def first_argument(function: Any) -> str:
    """The name of a function's first argument; "" if it does not say."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def by_parameters(optimizer: Any, model: nn.Module, first: Mapping[str, str]) -> MakeOptimizer:
    """`optimizer` as a function of parameters; one that takes pairs gets their names in `model`.

    first: the first name of each parameter, where the model is a part of one that ties some.
    """
    if first_argument(optimizer) != "named_parameters":
        made: MakeOptimizer = optimizer
        return made

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        names = [first.get(name, name) for name, _ in model.named_parameters()]
        # Masters and shards' stand-ins come in the order of the model's parameters.
        made: torch.optim.Optimizer = optimizer([*zip(names, parameters, strict=True)])
        for group in getattr(made, "param_groups", ()):
            group.pop("param_names", None)  # shards replace the parameters, and checkpoints have the names
        return made

    return make


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, all parts of these modules are in evaluation mode without gradients; then each as it was."""
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
    object. The variables of a closure are not found.
    """
    return [
        (store, name, value)
        for store in _stores(owners)
        for name, value in store.items()
        if isinstance(value, Tensor | int | float | None)
    ]


def _stores(owners: Iterable[Any]) -> list[dict[str, Any]]:
    objects = [getattr(getattr(each, "func", each), "__self__", each) for each in owners]
    parts = [part for each in objects for part in (each.modules() if isinstance(each, nn.Module) else [each])]
    found = [getattr(part, name, None) for part in parts for name in ("__dict__", "_buffers")]
    return [store for store in found if isinstance(store, dict)]


@contextmanager
def unchanged(*owners: Any) -> Iterator[None]:
    """Afterwards, modules and other objects have the state that they have now (`state_of`), and no more."""
    stores, state = _stores(owners), state_of(*owners)
    names = [{*store} for store in stores]
    before = [value.detach().clone() if isinstance(value, Tensor) else value for _, _, value in state]
    try:
        yield
    finally:
        for store, known in zip(stores, names, strict=True):
            for name in {*store} - known:
                if isinstance(store[name], Tensor | int | float | None):
                    del store[name]
        for (store, name, value), old in zip(state, before, strict=True):
            store[name] = value
            if isinstance(value, Tensor) and differs(value, old):
                value.data.copy_(old)


def differs(value: Any, old: Any) -> bool:
    """Whether a tensor has other values than before, or anything else is another object."""
    if not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return value is not old
    try:
        return not torch.equal(value, old)
    except RuntimeError:  # a dry run has no values, and sparse tensors are not compared
        return False
