"""An operation by torch's schema, and its arguments as a cache key or as fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorShape(NamedTuple):
    """Shape, strides and dtype of a tensor that does not exist yet."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class OperationKind:
    """Which arguments an operation views, writes or returns, according to its schema."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.names = [argument.name for argument in schema.arguments]
        aliases = [each.alias_info for each in schema.returns]
        viewed = any(alias is not None and not alias.is_write for alias in aliases)
        self.is_view = viewed or torch.Tag.inplace_view in func.tags
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written = [argument.name for argument in writes]
        by_set = {next(iter(a.alias_info.before_set)): a.name for a in writes if a.alias_info.before_set}
        self._outputs = [
            by_set.get(next(iter(alias.before_set))) if alias is not None and alias.before_set else None
            for alias in aliases
        ]
        self.returned = [name for name in self._outputs if name is not None]
        self.makes = len(self.returned) < len(self._outputs)
        self.gives_list = len(schema.returns) == 1 and str(schema.returns[0].type).startswith("List")
        self.size = self.names.index("size") if "size" in self.names else None

    def outputs(self, count: int) -> list[str | None]:
        """For each result the name of the argument that it is; None for a new tensor."""
        return [None] * count if self.gives_list else self._outputs


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def signature(value: Any) -> Any:
    """A key for a call's arguments; calls with equal keys have results of equal shapes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(signature, value))
    return type(value), str(value) if isinstance(value, torch.Generator) else value


def fakes(value: Any) -> Any:
    """Arguments with fake tensors in place of real ones; call this inside torch's fake mode."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if isinstance(value, list | tuple):
        return type(value)(map(fakes, value))
    if isinstance(value, dict):
        return {key: fakes(each) for key, each in value.items()}
    return value


def described(value: Any) -> Any:
    """Results with a `TensorShape` in place of each tensor."""
    if isinstance(value, Tensor):
        return TensorShape(torch.Size(value.shape), tuple(value.stride()), value.dtype)
    return [described(each) for each in value] if isinstance(value, list | tuple) else value
