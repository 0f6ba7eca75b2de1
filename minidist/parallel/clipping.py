"""Gradient clipping by the global norm: one long step does not throw a model off its way.

All gradients are seen as one vector; where it is longer than `max_norm` it is shortened to that, so its
direction stays. The norm is that of the gradients over all ranks: where each rank holds a share of them, the
sums of squares are summed over the ranks, which is one number.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group


def global_norm(gradients: Iterable[Tensor], sharded: bool = False, group: Group = None) -> float:
    """The Euclidean norm of all gradients together, summed up in float64.

    Args:
        gradients: of any shapes and floating dtypes, sparse ones too; there may be none.
        sharded: whether they are this rank's share, and over the ranks every element comes once. Sends
            2 (n - 1) / n 8 bytes. Otherwise each rank has all, and nothing is sent.
        group: the ranks that share them; None for all.

    Returns:
        The norm, the same on all ranks; infinite or NaN where an element is.
    """
    squares = []
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        squares.append(torch.linalg.vector_norm(values, dtype=torch.float64) ** 2)
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if sharded:
        total = total.to(comm.device())
        comm.all_reduce(total, group=group)
    return math.sqrt(float(total))


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of that norm are multiplied by: torch's formula, 1 at most, and NaN for NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1 else factor


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, sharded: bool = False, group: Group = None
) -> float:
    """Shorten gradients whose global norm is above `max_norm`, in place, for a loop that the user writes.

    As `torch.nn.utils.clip_grad_norm_`, over all ranks. A norm that is not finite makes gradients that are
    not finite, too: to skip such a step is the loop's.

    Args:
        parameters: whose gradients are clipped; those without one are passed over.
        max_norm: above 0.
        sharded: whether this rank has its share of the parameters only, as with `FullyShard`, or all.
        group: the ranks that share them; None for all.

    Returns:
        The norm before.

    Raises:
        ValueError: `max_norm` is not above 0.
        CollectiveError: a peer is gone or late.
    """
    check_max_norm("max_norm", max_norm)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients, sharded, group)
    factor = clip_factor(norm, max_norm)
    if factor != 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def check_max_norm(name: str, value: float) -> None:
    """ValueError where it is no norm to clip to."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} is {value!r}; give the largest norm that gradients may have, above 0")
