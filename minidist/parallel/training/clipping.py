"""Clip gradients by their global norm, so that one long step does not throw the model off course.

All gradients are one vector. If it is longer than `max_norm` it is shortened to that length, and keeps its
direction. The norm covers all ranks: if each holds a share of the gradients, they add up their sums of
squares, which is one number. An engine clips in its step (engine/training_step.py), and the classes for loops
in `Sharded.clip_grad_norm` (sharding/sharded.py). Which ranks' elements count, so that each counts once, is
decided in `TensorMap.norm` (engine/tensor_map.py) where tp or pp cut the model, and else in `Sharded.norm`.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from minidist import comm
from minidist._arguments import is_number
from minidist.comm.work import Group


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


def check_norm_type(value: float) -> None:
    """Raise ValueError if `value` is not the p of a p-norm."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"norm_type is {value!r}; give the p of a p-norm, above 0, or math.inf")


def check_max_norm(name: str, value: float) -> None:
    """Raise ValueError if `value` is not a norm to clip to."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name} is {value!r}; give the largest norm that gradients may have, above 0")
