"""Settings of `cutting_the_model`: a stage of a chain on each rank, and the gradients that a step leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from checks.ranks import Case
from checks.support.words import plural


def chains(draw: np.random.Generator, ranks: int) -> list[Case]:
    """Each rank's stage, and the rows that go through all of them."""
    return [_chain(draw, ranks, rows, width) for rows, width in ((2, 3), (1, 1), (5, 4))]


def _chain(draw: np.random.Generator, ranks: int, rows: int, width: int) -> Case:
    def tensor(*shape: int) -> Tensor:
        return torch.from_numpy(draw.uniform(-1, 1, shape))

    stages = [nn.Sequential(nn.Linear(width, width, dtype=torch.float64), nn.Tanh()) for _ in range(ranks)]
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.copy_(tensor(*parameter.shape))
    inputs, targets = tensor(rows, width), tensor(rows, width)
    return Case(
        [(stage, inputs, targets) for stage in stages],
        f"{plural(ranks, 'rank')} with {plural(rows, 'row')} of {width}",
    )


def with_gradients(function: Callable[..., Any], stage: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    """What it returns, how often the stage ran, and the gradients, which do not travel with a module."""
    ran: list[bool] = []
    counting = stage.register_forward_hook(lambda *_: ran.append(True))
    try:
        result = function(stage, inputs, targets)
    except (TypeError, AttributeError) as error:
        if "None" not in str(error):
            raise
        text = (
            f"{error}. Is it x.grad? That is None unless x.requires_grad_() was called after x arrived "
            "and before stage(x)"
        )
        raise type(error)(text).with_traceback(error.__traceback__) from None
    finally:
        counting.remove()
    is_tensor = isinstance(result, Tensor)
    gradients = [parameter.grad for parameter in stage.parameters()]
    return (result.detach() if is_tensor else result), is_tensor, len(ran), gradients
