"""The loss that every strategy trains on, and the accuracy that people read.

A loss is the mean over its rows. So data parallelism can weigh shares of unequal size by their rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""The target of a token that `masked_cross_entropy` leaves out; torch's default for it."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:  # (..., V), (...) -> ()
    """Return the mean over all rows (or tokens) of -log softmax(outputs)[target], a scalar with gradient.

    outputs: (..., V), floating; float16 and bfloat16 are first widened to float32. targets: (...), integers
    from 0 to V - 1. Raises ValueError if the shapes do not fit or there are no rows, TypeError if targets are
    not integers, and torch's error for a target out of range.
    """
    _check(outputs, targets)
    require_rows(targets)
    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    rows, classes = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1).long()
    # By default torch leaves out rows with target -100, so the mean would not be over all rows.
    return functional.cross_entropy(rows, classes, ignore_index=torch.iinfo(torch.int64).min)


def masked_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:  # (B, T, V), (B, T) -> ()
    """Return the mean of -log softmax(outputs)[target] over hidden tokens, whose target is not IGNORED.

    As `cross_entropy` otherwise. Each row has to hide equally many, as `masked` does: then the mean over rows
    is the mean over hidden tokens. Raises ValueError if none is hidden.
    """
    _check(outputs, targets)
    hidden = targets != IGNORED
    return cross_entropy(outputs[hidden], targets[hidden])


@torch.no_grad()
def masked_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:  # (B, T, V), (B, T) -> ()
    """Return the share of hidden tokens whose largest output is the target's, a float64 scalar."""
    hidden = targets != IGNORED
    return accuracy(outputs[hidden], targets[hidden])


@torch.no_grad()
def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:  # (..., V), (...) -> ()
    """Return the share of rows whose largest output is the target's, a float64 scalar; NaN without rows."""
    _check(outputs, targets)
    return (outputs.argmax(dim=-1) == targets).double().mean()


def _check(outputs: Tensor, targets: Tensor) -> None:
    if outputs.dim() == 0 or outputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}; "
            "give outputs (..., classes) and targets (...); for outputs (B, classes, ...), as of images, "
            "give prepare the loss torch.nn.functional.cross_entropy"
        )
    require_classes(targets)


def require_classes(targets: Tensor) -> None:
    """Raise TypeError if targets are not integers."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets are {targets.dtype}; give class numbers, as torch.int64")


def require_rows(targets: Tensor) -> None:
    """Raise ValueError if there are no targets."""
    if targets.numel() == 0:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} are empty, and the mean loss of an empty batch is "
            "undefined; give at least one row"
        )
