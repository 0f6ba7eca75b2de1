"""The hooks by which a module tells `Passes` how far a pass has come, and the tensors they are set on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from minidist.parallel.shard_units import Unit

if TYPE_CHECKING:
    from minidist.parallel.shard_passes import Pass, Passes


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


Owner: TypeAlias = "weakref.ref[Passes]"


def before(owner: Owner, unit: Unit) -> Callable[..., None]:
    """A forward pre-hook: a unit is called."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        passes = owner()
        if passes is not None:
            passes.begin(unit, (args, kwargs) if kwargs else args)

    return hook


def after(owner: Owner, unit: Unit) -> Callable[..., None]:
    """A forward hook: a unit has returned."""

    def hook(_: nn.Module, inputs: Any, outputs: Any) -> None:
        passes = owner()
        if passes is not None:
            passes.end(unit, inputs, outputs)

    return hook


def needed(owner: Owner, of: Pass, unit: Unit) -> Callable[[Tensor], None]:
    """On an output of a unit: its backward pass begins."""

    def hook(_: Tensor) -> None:
        passes = owner()
        if passes is not None:
            passes.need(of, unit)

    return hook


def ended(owner: Owner, of: Pass, unit: Unit) -> Callable[[Tensor], None]:
    """On an input of a unit: its backward pass is over."""

    def hook(_: Tensor) -> None:
        passes = owner()
        if passes is not None:
            passes.ended(of, unit)

    return hook


def remove(handles: list[Any]) -> None:
    """Take hooks off."""
    for handle in handles:
        handle.remove()
