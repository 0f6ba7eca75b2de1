"""Gradient clipping by the global norm: one long step does not throw a model off its way.

All gradients are seen as one vector; where it is longer than `max_norm` it is shortened to that, so its
direction stays. The norm is that of the gradients over all ranks: where each rank holds a share of them, the
sums of squares are summed over the ranks, which is one number.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from minidist import comm
from minidist.comm.work import Group

Why = Callable[[bool], str | None]
"""Why gradients cannot be clipped as they are, as if this rank had all or not; None where they can."""
_guards = WeakIdKeyDictionary()  # by parameter, for as long as it lives


def global_norm(
    gradients: Iterable[Tensor], sharded: bool = False, group: Group = None, norm_type: float = 2.0
) -> float:
    """The norm of all gradients together, as one vector, summed up in float64.

    Args:
        gradients: of any shapes and floating dtypes, sparse ones too; there may be none.
        sharded: whether they are this rank's share, and over the ranks every element comes once. Sends
            2 (n - 1) / n 8 bytes. Otherwise each rank has all, and nothing is sent.
        group: the ranks that share them; None for all.
        norm_type: the p of the p-norm, above 0: 2 for the Euclidean, `math.inf` for the largest element.

    Returns:
        The norm, the same on all ranks; infinite or NaN where an element is.
    """
    largest = norm_type == math.inf
    powers = []
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel():
            norm = torch.linalg.vector_norm(values, norm_type, dtype=torch.float64)
            powers.append(norm if largest else norm**norm_type)
    total = torch.zeros((), dtype=torch.float64)
    if powers:
        total = torch.stack(powers).max() if largest else torch.stack(powers).sum()
    if sharded:
        total = total.to(comm.device())
        if largest:
            total = total.nan_to_num(nan=math.inf, posinf=math.inf)  # not every maximum lets a NaN through
        comm.all_reduce(total, "max" if largest else "sum", group=group)
    if largest:
        return float(total)
    return math.sqrt(float(total)) if norm_type == 2 else float(total) ** (1 / norm_type)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of that norm are multiplied by: torch's formula, 1 at most, and NaN for NaN."""
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
    """Shorten gradients whose global norm is above `max_norm`, in place, for a loop that the user writes.

    As `torch.nn.utils.clip_grad_norm_`, over all ranks. A norm that is not finite makes gradients that are
    not finite, too: to skip such a step is the loop's.

    Args:
        parameters: whose gradients are clipped; those without one are passed over.
        max_norm: above 0.
        sharded: whether this rank has its share of the parameters only, as with `FullyShard`, or all.
        group: the ranks that share them; None for all.
        norm_type: see `global_norm`.

    Returns:
        The norm before.

    Raises:
        ValueError: `max_norm` or `norm_type` is not above 0; or the parameters are those of a `FullyShard` or
            `ZeroOptimizer` and their gradients are not what it will use: these have a `clip_grad_norm`.
        CollectiveError: a peer is gone or late.
    """
    check_max_norm("max_norm", max_norm)
    check_norm_type(norm_type)
    parameters = [*parameters]
    for parameter in parameters:
        reason = _guards[parameter](not sharded) if parameter in _guards else None
        if reason is not None:
            raise ValueError(f"{reason}; call its clip_grad_norm(max_norm)")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients, sharded, group, norm_type)
    factor = clip_factor(norm, max_norm)
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def guard(parameters: Iterable[Tensor], why: Why) -> None:
    """Have `clip_grad_norm` refuse these where `why` gives a reason."""
    for parameter in parameters:
        _guards[parameter] = why


def check_norm_type(value: float) -> None:
    """ValueError where it is no norm's."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"norm_type is {value!r}; give the p of a p-norm, above 0, or math.inf")


def check_max_norm(name: str, value: float) -> None:
    """ValueError where it is no norm to clip to."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} is {value!r}; give the largest norm that gradients may have, above 0")
