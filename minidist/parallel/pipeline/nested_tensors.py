"""Tensors inside nested tuples, lists, dicts and dataclasses: a batch, or a layer's arguments or outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]
"""Where a tensor lies: the index, key or field at each level."""


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in a value, with their paths."""
    items: Any = ()
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = ((each.name, getattr(value, each.name)) for each in fields(value))
    for key, each in items:
        yield from tensors_in(each, (*path, key))


def replaced(value: Any, new: Callable[[Any], Any], kinds: Any = Tensor) -> Any:
    """A copy of tuples, lists and dicts in which `new` replaces each object of `kinds`."""
    if isinstance(value, kinds):
        return new(value)
    if isinstance(value, tuple | list):
        items = [replaced(each, new, kinds) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = copy.copy(value) if isinstance(value, dict) else dict(value)
        for key, each in value.items():
            changed[key] = replaced(each, new, kinds)
        return changed
    return value


def at(value: Any, path: Path) -> Any:
    """The value at a path of tuples, lists and dicts."""
    for key in path:
        value = value[key]
    return value
