"""Clip gradients by their global norm, so that one long step does not throw the model off course.

All gradients are one vector. If it is longer than `max_norm` it is shortened to that length, and keeps its
direction. The norm covers all ranks: if each holds a share of the gradients, they add up their sums of
squares, which is one number. An engine clips in its step (engine/training_step.py), the classes for loops in
`AllParameters.clip_grad_norm` (sharding/optimizer/all_parameters.py), and your own loop by `clip_gradients`.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from minidist import comm
from minidist._arguments import is_number
from minidist.comm.work import Group

Why = Callable[[bool], str | None]
"""From whether this rank has whole gradients to the reason they cannot be clipped; None if they can."""
_guards = WeakIdKeyDictionary()  # parameter -> its `Why`, while the parameter lives


def global_norm(
    gradients: Iterable[Tensor], sharded: bool = False, group: Group = None, norm_type: float = 2.0
) -> float:
    """Return the norm of all gradients as one vector, summed in float64: the same on all ranks.

    It is infinite or NaN if an element is. gradients: of any shapes and floating or complex dtypes, dense or
    sparse; may be empty. sharded: whether each element is on one rank, which sends 2 (n - 1) / n 8 bytes; if
    False, each rank has all gradients and nothing is sent. norm_type: the p of the p-norm, above 0;
    `math.inf` for the largest element.
    """
    norms = []
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel():
            wide = torch.complex128 if values.is_complex() else torch.float64
            norms.append(torch.linalg.vector_norm(values, norm_type, dtype=wide))
    own = torch.zeros((), dtype=torch.float64)
    if norms:
        own = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if not sharded:
        return float(own)
    own = own.to(comm.device())
    if norm_type == math.inf:  # some backends' maximum drops a NaN
        return float(comm.all_reduce(own.nan_to_num(nan=math.inf, posinf=math.inf), "max", group=group))
    return math.pow(float(comm.all_reduce(own**norm_type, group=group)), 1 / norm_type)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor for gradients of this norm: torch's formula, at most 1, and NaN for NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1 else factor


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    sharded: bool = False,
    group: Group = None,
    norm_type: float = 2.0,
) -> float:
    """Shorten gradients whose global norm is above `max_norm`, in place, and return the norm before.

    For a loop that the user writes: `torch.nn.utils.clip_grad_norm_` over all ranks. If the norm is not
    finite, the gradients are not finite afterwards; the loop has to skip such a step itself. Parameters
    without a gradient are skipped. sharded: whether this rank has only its share of the parameters, as with
    `FullyShard`. group, norm_type: see `global_norm`.

    Raises ValueError if `max_norm` or `norm_type` is not above 0, or if the parameters belong to a
    `FullyShard` or `ZeroOptimizer` that will not use these gradients as they are: call its own
    `clip_grad_norm`.
    """
    check_max_norm("max_norm", max_norm)
    check_norm_type(norm_type)
    parameters = [*parameters]
    for parameter in parameters:
        reason = _guards[parameter](not sharded) if parameter in _guards else None
        if reason is not None:
            raise ValueError(f"{reason}; call its clip_grad_norm(max_norm)")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return clip_gradients(gradients, max_norm, sharded, group, norm_type)


@torch.no_grad()
def clip_gradients(
    gradients: Sequence[Tensor], max_norm: float, sharded: bool, group: Group, norm_type: float
) -> float:
    """Shorten gradients whose `global_norm` is above `max_norm`, in place, and return the norm before."""
    norm = global_norm(gradients, sharded, group, norm_type)
    if (factor := clip_factor(norm, max_norm)) != 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def guard(parameters: Iterable[Tensor], why: Why) -> None:
    """Make `clip_grad_norm` refuse these parameters whenever `why` returns a reason."""
    for parameter in parameters:
        _guards[parameter] = why


def check_norm_type(value: float) -> None:
    """Raise ValueError if `value` is not the p of a p-norm."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"norm_type is {value!r}; give the p of a p-norm, above 0, or math.inf")


def check_max_norm(name: str, value: float) -> None:
    """Raise ValueError if `value` is not a norm to clip to."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name} is {value!r}; give the largest norm that gradients may have, above 0")
