"""What `DataParallel`, `ZeroOptimizer` and `FullyShard` have in common: the classes for a loop of one's own.

Each is a face: it says what its arguments mean, checks them, and makes one object that does the work. Most
of its methods are that object's own, under the names that loops know from torch (`delegated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import inf
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from minidist._arguments import is_number
from minidist.parallel.contract.residency import ROWS
from minidist.parallel.flat.joined_messages import give_memory
from minidist.parallel.guards.claims import require_free
from minidist.parallel.guards.refusals import refuse_renormed, require_trained

P = ParamSpec("P")
R = TypeVar("R")
ZERO_OPTIMIZER_STAGES = [stage for stage, row in ROWS.items() if row.whole_parameters and not row.whole_state]
"""The stages of `ZeroOptimizer`."""


def delegated(to: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A face's method: `method` of its attribute `to`, with the same arguments and docstring."""
    made: Any = _Delegated(to, method)  # which `__set_name__` replaces by a function
    found: Callable[Concatenate[Any, P], R] = made
    return found


class _Delegated:
    def __init__(self, to: str, method: Callable[..., Any]) -> None:
        self._to, self._method = to, method

    def __set_name__(self, face: type, name: str) -> None:
        to, method = self._to, self._method

        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(getattr(self, to), *args, **kwargs)

        call.__name__, call.__qualname__ = name, f"{face.__qualname__}.{name}"
        setattr(face, name, call)


def check_module(module: nn.Module, shared_with: Sequence[str] = (), is_alone: bool = False) -> None:
    """TypeError or ValueError where ranks cannot train a module together, or another object trains it.

    shared_with: kinds of objects that may. is_alone: there is one rank.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give a torch.nn.Module")
    require_free(module.named_parameters(), shared_with)
    if not is_alone:
        refuse_renormed(module)
    give_memory(module)


def check_fully_shard_arguments(
    module: nn.Module,
    optimizer_class: Any,
    units: Any,
    initialize: Any,
    prefetch: Any,
    master: Any,
) -> None:
    """TypeError or ValueError where an argument of `FullyShard` is wrong."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give a torch.nn.Module")
    _check_class(optimizer_class)
    if units is not None and (isinstance(units, str | type | nn.Module) or not isinstance(units, Iterable)):
        raise TypeError(f"units is {units!r}; give a list of classes or modules, such as [nn.Linear]")
    if initialize is not None and not callable(initialize):
        raise TypeError(
            f"initialize is {initialize!r}; give a function that fills a module's own parameters, or None"
        )
    if prefetch is not None and not isinstance(prefetch, bool):
        raise TypeError(f"prefetch is {prefetch!r}; give True, False, or None to have it chosen")
    _check_master(master)
    require_trained("module", module.parameters())
    check_module(module)


def check_zero_arguments(stage: Any, optimizer_class: Any, bucket_mb: Any, master: Any) -> None:
    """TypeError or ValueError where an argument of `ZeroOptimizer` is wrong."""
    if stage not in ZERO_OPTIMIZER_STAGES or isinstance(stage, bool):
        raise ValueError(f"stage is {stage!r}; give 1 or 2, or use FullyShard for stage 3")
    _check_class(optimizer_class)
    check_bucket_mb(bucket_mb)
    _check_master(master)


def check_bucket_mb(value: Any) -> None:
    """ValueError where `value` is not a size of buckets in megabytes."""
    if not is_number(value) or not 0 <= value < inf:
        raise ValueError(f"bucket_mb is {value!r}; give megabytes, or 0 for one message a parameter")


def _check_class(optimizer_class: Any) -> None:
    if isinstance(optimizer_class, torch.optim.Optimizer) or not callable(optimizer_class):
        given = repr(optimizer_class) if isinstance(optimizer_class, str) else type(optimizer_class).__name__
        raise TypeError(f"optimizer_class is {given}; give a class, such as torch.optim.AdamW")


def _check_master(master: Any) -> None:
    if master is not None and not (isinstance(master, torch.dtype) and master.is_floating_point):
        raise TypeError(f"master is {master!r}; give a floating-point dtype, such as torch.float32, or None")
