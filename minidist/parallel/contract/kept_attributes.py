"""Put modules and functions back: their mode, and what a call has written to their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def stores_of(owners: Iterable[Any]) -> list[dict[str, Any]]:
    """The dicts of attributes and buffers of modules and their parts, and of attributes of other objects."""
    objects = [getattr(getattr(each, "func", each), "__self__", each) for each in owners]
    parts = [part for each in objects for part in (each.modules() if isinstance(each, nn.Module) else [each])]
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
