"""Every layout of up to 8 ranks that the axes allow trains to the weights of one process."""

from __future__ import annotations

from collections.abc import Callable

import contract
import torch
from torch import Tensor

import minidist as md
from minidist.model import GPT, config

Clusters = Callable[[int], md.Cluster]


def tokens(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 11, (count, 9), generator=generator)
    return text[:, :-1], text[:, 1:]


def gpt(seed: int) -> GPT:
    shape = config("byte-tiny", vocabulary=11, context=8, layers=4, heads=2, width=8)
    return GPT(shape, seed=seed, dtype=torch.float64)


CASE = contract.Case(gpt, tokens, clip_norm=0.5)
