"""Hooks by which a unit's calls and their backward passes are seen.

A hook on a call's outputs runs just before its backward pass, and one on its inputs just after: autograd
takes what was recorded last first, so that by then all of the call's gradients have come. Inputs are passed
on as views of themselves, recorded as the call begins: the gradient of a parameter may come earlier, and that
of another module's output is complete only once everybody else who took it is done.

Source: Zhao et al. 2023, "PyTorch FSDP", section 4.3 (hooks around a unit).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minidist.parallel.sharding.units import Unit

if TYPE_CHECKING:
    from minidist.parallel.sharding.unit_pass import UnitPass
    from minidist.parallel.sharding.unit_runtime import UnitRuntime


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

    Lists and what else a module may write to are passed on as they are.

    Attributes:
        args, kwargs: what the module gets.
        seen: tensors of which the first to get its gradient says that the call's backward pass is over.
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


def watch(passes: UnitRuntime, units: Iterable[Unit]) -> None:
    """Tell `passes` of the units' calls, for as long as it lives."""
    owner = weakref.ref(passes)  # the modules may outlive it, and it must not live on in their hooks
    handles: list[Any] = []
    for unit in units:
        handles += [
            unit.module.register_forward_pre_hook(_before(owner, unit), prepend=True, with_kwargs=True),
            unit.module.register_forward_hook(_after(owner, unit), with_kwargs=True),
        ]
    weakref.finalize(passes, _remove, handles).atexit = False


Owner = weakref.ref["UnitRuntime"]


def _before(owner: Owner, unit: Unit) -> Callable[..., Any]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        passes = owner()
        return passes.begin(unit, args, kwargs) if passes is not None else None

    return before


def _after(owner: Owner, unit: Unit) -> Callable[..., None]:
    def after(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        passes = owner()
        if passes is not None:
            passes.end(unit, (args, kwargs), outputs)

    return after


def needed(passes: UnitRuntime, of: UnitPass, unit: Unit) -> Callable[[Tensor], None]:
    """A hook on outputs of a unit's call."""
    owner = weakref.ref(passes)

    def needed(_: Tensor) -> None:
        passes = owner()
        if passes is not None:
            passes.need(of, unit)

    return needed


def ended(passes: UnitRuntime, of: UnitPass, unit: Unit, call: int) -> Callable[[Tensor], None]:
    """A hook on inputs of a unit's call, which is the pass's `call`-th of it."""
    owner = weakref.ref(passes)

    def ended(_: Tensor) -> None:
        passes = owner()
        if passes is not None:
            passes.ended(of, unit, call)

    return ended


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
