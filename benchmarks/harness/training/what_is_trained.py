"""What is trained: a model, the rows of a global batch, the optimizer; the loop that torch's users write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.model.configs import GPTConfig, config
from minidist.model.data import dataset
from minidist.model.gpt import GPT
from minidist.model.mlp import MLP
from minidist.model.sampler import Sampler
from minidist.parallel.training.muon import Muon

SEED = 0
MUON = partial(Muon, lr=0.01, adamw_lr=1e-3)
"""The optimizer of rows that name it."""
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
"""The optimizer of all other steps, ours and the peers'. Its fused call updates all parameters of a kind."""
BATCHES = 4
"""Number of different global batches; training repeats them."""
Batch = tuple[Tensor, Tensor]
Train = Callable[[Tensor, Tensor], "float | None"]
"""A step on this rank's share of a batch; it returns the loss, or None if this rank does not know it."""


@dataclass(frozen=True)
class Work:
    """The work of a training step: a model, and the rows of a global batch."""

    model: str  # "mlp", or the name of a GPT's configuration
    rows: int
    tied: bool = False  # whether a GPT's output matrix is its token table; some peers can't tie weights
    hidden: tuple[int, ...] = (512, 512, 512)  # widths of the MLP's hidden layers
    experts: int = 0  # in each block of a GPT, in place of its MLP
    micro_batches: int = 4  # of a pipeline's step
    cut_by_time: bool = False  # a pipeline's layers are cut so that the slowest part is as fast as can be

    def build(self) -> nn.Module:
        """Build the model, the same on every rank."""
        if self.model == "mlp":
            return MLP((64, *self.hidden, 10), seed=SEED)
        shape = config(self.model, tied=self.tied, experts=self.experts)
        assert isinstance(shape, GPTConfig)
        return GPT(shape, seed=SEED)

    def batches(self) -> list[Batch]:
        """Return the global batches, the same on every rank."""
        if self.model == "mlp":
            return drawn(dataset("digits"), self.rows)
        return drawn(
            dataset("bytes", length=config(self.model).context, limit=self.rows * BATCHES), self.rows
        )


def drawn(data: Any, rows: int) -> list[Batch]:
    """Return global batches of a data set, the same on every rank."""
    sampler = Sampler(len(data.train), rows, drop_last=True, seed=SEED)
    return [data.train[sampler.share(step)] for step in range(BATCHES)]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return torch's loss of the outputs for each token, or for each row."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def plain_loop(
    model: nn.Module,
    optimizer: Any,
    loss_of: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Callable[[Tensor, Tensor], float]:
    """Return a training step as torch's users write it; the passes run inside the context `around`."""

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        with around():
            loss = loss_of(model(inputs), targets)
            backward(loss)
        optimizer.step()
        return loss.item()

    return step
