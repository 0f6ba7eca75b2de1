"""What would train wrongly, or fail in the middle of a step: told before any is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def refuse_renormed(model: nn.Module) -> None:
    """ValueError where an embedding has max_norm.

    Its forward pass shortens the rows that it reads, in place: on each rank others, so that the ranks' tables
    differ, and in copies of the parameters that are gathered or rounded, so that it is forgotten.
    """
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} is an {type(part).__name__} with max_norm={part.max_norm}, which "
                "shortens other rows on each rank; leave max_norm out, and shorten all rows alike after each "
                "step, such as with torch.renorm, or train on one rank"
            )


def refuse_meta(what: str, named: Any) -> None:
    """ValueError where a parameter or buffer has no values yet."""
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(
                f"{what} has {name} on the meta device, without values; build it on a real device, or train "
                "with FullyShard, which builds it unit by unit, or in a layout with zero=3, tp or pp"
            )


def require_trained(what: str, parameters: Any) -> None:
    """ValueError where no parameter gets gradients."""
    found = [*parameters]
    if not any(parameter.requires_grad for parameter in found):
        have = "all of its parameters are frozen" if found else "it has no parameters"
        raise ValueError(f"{what} has nothing to train, since {have}; give one with requires_grad")


def require_optimizer(made: object, name: str = "optimizer") -> None:
    """TypeError where a function that was to make an optimizer made something else."""
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"{name} made a {type(made).__name__}; give a function from parameters to a "
            "torch.optim.Optimizer, such as functools.partial(torch.optim.AdamW, lr=3e-4)"
        )


def require_batch(inputs: object, targets: object) -> None:
    """TypeError where a batch is no two tensors."""
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, Tensor) or not value.dim():
            given = "tensor without dimensions" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"the {name} are a {given}; give a tensor whose first dimension is the rows")


def require_metric(metric: object) -> None:
    """TypeError where it is no function, nor None for the loss."""
    if metric is not None and not callable(metric):
        raise TypeError(
            f"metric is {metric!r}; give a function from outputs and targets to the mean over their rows, or "
            "None for the loss"
        )
