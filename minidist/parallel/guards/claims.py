"""Record which object trains a parameter: one at a time, or gradients would be summed and applied twice.

`DataParallel`, `ZeroOptimizer`, `FullyShard` and the engines of `prepare` claim the parameters that they put
hooks on; a second one gets an error. A claim ends with the trainer, because the hooks end with it. The claim
of a `FullyShard` stays, because the parameters that it leaves behind have no values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class _Claim(NamedTuple):
    trainer: weakref.ref[Any]
    kind: str
    takes_values: bool  # whether the trainer moved the values into shards


BY_DATA_PARALLEL, BY_ZERO, BY_ENGINE = "a DataParallel", "a ZeroOptimizer", "an engine of prepare"
BY_FULLY_SHARD = "a FullyShard, or prepare with zero=3,"

_claims: Any = WeakIdKeyDictionary()  # parameter -> its claims, the latest first


def claim(trainer: object, kind: str, parameters: Iterable[Tensor], takes_values: bool = False) -> None:
    """Record that `trainer`, an object of this `kind`, trains these parameters for as long as it lives."""
    new = _Claim(weakref.ref(trainer), kind, takes_values)
    for parameter in parameters:
        others = [each for each in _claims_on(parameter) if each.trainer() is not trainer]
        _claims[parameter] = [new, *others]


def trainers(parameters: Iterable[Tensor], kind: str) -> list[Any]:
    """The living objects of this kind that train any of the parameters, each once."""
    alive = [each.trainer() for p in parameters for each in _claims_on(p) if each.kind == kind]
    return [*{id(trainer): trainer for trainer in alive if trainer is not None}.values()]


@contextmanager
def untrained() -> Iterator[None]:
    """Inside, no claimed parameter gets gradients, so that none of its trainer's hooks runs."""
    found = [parameter for parameter in [*_claims] if parameter.requires_grad and _claims_on(parameter)]
    try:
        for parameter in found:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in found:
            parameter.requires_grad_(True)


def release(parameters: Iterable[Tensor]) -> None:
    """End the claims on parameters whose trainer's constructor failed: a traceback may keep it alive."""
    released = [*parameters]
    for kind in (BY_DATA_PARALLEL, BY_ZERO):
        for trainer in trainers(released, kind):
            trainer.detach()
    for parameter in released:
        _claims[parameter] = [each for each in _claims_on(parameter) if each.takes_values]


def require_free(named: Iterable[tuple[str, Tensor]], shared_with: Sequence[str] = ()) -> None:
    """Raise ValueError if another object trains one of the named parameters, or has taken its values.

    Several objects may share a frozen parameter, as long as none of them takes its values. The new trainer
    may share parameters with those of the kinds in `shared_with`.
    """
    parameters = [*named]
    if _first(parameters, shared_with) is not None:
        gc.collect()  # a trainer without references may still wait to be collected
    found = _first(parameters, shared_with)
    if found is None:
        return
    name, by = found
    if by.takes_values:
        raise ValueError(
            f"the parameter {name} was sharded by {by.kind} already, and its values are in the shards; train "
            "on with the first, or load its state_dict(), or an engine's full_state_dict(), into a new model"
        )
    raise ValueError(
        f"the parameter {name} is trained by {by.kind} already, and two would both change it; train on with "
        "the first, or del it, and what refers to it, before the second is made"
    )


def _claims_on(parameter: Tensor) -> list[_Claim]:
    """The claims that still hold."""
    return [each for each in _claims.get(parameter, ()) if each.takes_values or each.trainer() is not None]


def _first(named: Sequence[tuple[str, Tensor]], shared_with: Sequence[str]) -> tuple[str, _Claim] | None:
    for name, parameter in named:
        for each in sorted(_claims_on(parameter), key=lambda each: not each.takes_values):
            if each.takes_values or (parameter.requires_grad and each.kind not in shared_with):
                return name, each
    return None
