"""A small model and its rows, for trainings whose ranks do not agree in every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minidist.model import MLP


def vectors(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def mlp(seed: int) -> nn.Module:
    return MLP((6, 5, 3), seed=seed, dtype=torch.float64)
