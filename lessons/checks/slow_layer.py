"""A layer that takes as long as it is told, as if its rank had a device of its own (lessons 10 and 12).

Ranks of one machine share its cores: four that compute on two cores take twice as long as on four. A rank
that sleeps takes no core, so that its passes last as long on any machine, however many ranks there are.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class SlowLayer(nn.Module):
    """Multiplies by a weight of 1; each row takes `seconds` forward, and twice that backward.

    The gradients of input and weight take `seconds` a row each, and can be asked for apart.

    Args:
        seconds: of a row, in the forward pass and in each half of the backward pass.
        parameters: so many more, which take no time, but have a gradient.
    """

    def __init__(self, seconds: float, parameters: int = 0) -> None:
        super().__init__()
        self.others = nn.Parameter(torch.zeros(parameters)) if parameters else None
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))  # so that the first stage has its input's half too

    def forward(self, x: Tensor) -> Tensor:  # (rows, features), the same
        """x times the weight, late."""
        lasts = self.seconds * len(x)
        time.sleep(lasts)
        y = _Late.apply(x + self.shift, lasts) * _Late.apply(self.weight, lasts)
        return y if self.others is None else y + self.others.mean()


class _Late(torch.autograd.Function):
    """The identity, whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None
