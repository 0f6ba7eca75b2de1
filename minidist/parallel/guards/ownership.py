"""Who trains a parameter: one object at a time, or gradients would be summed and applied twice.

`DataParallel`, `ZeroOptimizer`, `FullyShard` and the engines of `prepare` claim the parameters that they put
hooks on, and whoever comes second is told. A claim ends with its object, whose hooks end with it, too; that
of a `FullyShard` stays, for what it leaves of parameters has no values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class _Claim:
    owner: weakref.ref[Any]
    kind: str
    takes_values: bool  # whether they are in shards from now on


DATA_PARALLEL, ZERO, ENGINE = "a DataParallel", "a ZeroOptimizer", "an engine of prepare"
FULLY_SHARD = "a FullyShard, or prepare with zero=3,"

_claims: Any = WeakIdKeyDictionary()  # from parameters to their claims, the last first


def claim(owner: object, kind: str, parameters: Iterable[Tensor], takes_values: bool = False) -> None:
    """`owner`, which is `kind`, trains these parameters for as long as it lives."""
    new = _Claim(weakref.ref(owner), kind, takes_values)
    for parameter in parameters:
        others = [each for each in _claims_on(parameter) if each.owner() is not owner]
        _claims[parameter] = [new, *others]


def owners(parameters: Iterable[Tensor], kind: str) -> list[Any]:
    """The objects of this kind that are alive and train some of the parameters, each once."""
    alive = [each.owner() for p in parameters for each in _claims_on(p) if each.kind == kind]
    return [*{id(owner): owner for owner in alive if owner is not None}.values()]


def release(parameters: Iterable[Tensor]) -> None:
    """Who was made of these parameters is not to train them: its making failed, or that of what has it.

    An error's traceback may keep it alive for long.
    """
    released = [*parameters]
    for kind in (DATA_PARALLEL, ZERO):
        for owner in owners(released, kind):
            if owner.reducer is not None:
                owner.reducer.detach()
    for parameter in released:
        _claims[parameter] = [each for each in _claims_on(parameter) if each.takes_values]


def require_free(named: Iterable[tuple[str, Tensor]], beside: Sequence[str] = ()) -> None:
    """ValueError where another object trains one of the parameters, or has taken its values.

    A frozen parameter may serve several, as long as none of them takes its values.

    Args:
        named: the parameters with their names.
        beside: kinds of objects that the new one may stand beside.
    """
    parameters = [*named]
    if _first(parameters, beside) is not None:
        gc.collect()  # what nobody refers to any more may wait for it
    found = _first(parameters, beside)
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
    """Those that hold."""
    return [each for each in _claims.get(parameter, ()) if each.takes_values or each.owner() is not None]


def _first(named: Sequence[tuple[str, Tensor]], beside: Sequence[str]) -> tuple[str, _Claim] | None:
    for name, parameter in named:
        for each in sorted(_claims_on(parameter), key=lambda each: not each.takes_values):
            if each.takes_values or (parameter.requires_grad and each.kind not in beside):
                return name, each
    return None
