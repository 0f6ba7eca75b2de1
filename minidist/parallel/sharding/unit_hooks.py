"""Hooks that show a unit's calls and their backward passes.

A hook on a call's outputs runs just before its backward pass, and one on its inputs just after: autograd
takes what was recorded last first, so all of the call's gradients have come by then. The inputs are passed on
as views of themselves, recorded as the call begins: the gradient of a parameter may come earlier, and that of
another module's output is complete only once every user of that output is done.

Source: Zhao et al. 2023, "PyTorch FSDP", section 4.3 (hooks around a unit).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


class Inputs:
    """The inputs of one call, in which tensors that get gradients have become views of themselves.

    Lists, and whatever else a module may write to, are passed on as they are. The first tensor of `seen` to
    get its gradient shows that the call's backward pass is over.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._views: dict[int, Tensor] = {}  # a tensor that comes twice stays one
        self.args = tuple(map(self._view, args))
        self.kwargs = {key: self._view(value) for key, value in kwargs.items()}
        self.seen = [*self._views.values()]
        if not self.seen:
            self.seen = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not t.is_leaf]

    def _view(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._view, value))
        if not isinstance(value, Tensor) or not value.requires_grad or value.layout is not torch.strided:
            return value
        if id(value) not in self._views:
            self._views[id(value)] = value.view_as(value)
        return self._views[id(value)]


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A hook that calls `method` with `first` and its own arguments while the method's object lives.

    Modules and graphs may outlive that object, and it must not live on in their hooks.
    """
    alive = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        found = alive()
        return None if found is None else found(*first, *args)

    return hook
