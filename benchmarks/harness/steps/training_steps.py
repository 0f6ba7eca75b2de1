"""Time our engine's training steps in turns with those of plain torch.

This code runs inside the ranks, since only ranks that run a step together can time it. Every rank makes the
same calls in the same order, A B A B, and returns its own times. The peer is the loop that people write:
torch's DistributedDataParallel, or no wrapper on a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.kernels.measure.harness import time_in_turns
from minidist.model.configs import config
from minidist.model.data import dataset
from minidist.model.gpt import GPT
from minidist.model.mlp import MLP
from minidist.model.sampler import Sampler

SEED = 0
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
"""The optimizer of all steps, ours and the peers'. Its fused call updates all parameters of a kind."""


@dataclass(frozen=True)
class Case:
    """The model to train, and the rows of a global batch."""

    model: str  # "mlp", or the name of a GPT's configuration
    rows: int  # of the global batch
    hidden: int = 512  # width of the MLP's two hidden layers

    def build(self) -> nn.Module:
        """Build the model, the same on every rank."""
        if self.model == "mlp":
            return MLP((64, self.hidden, self.hidden, 10), seed=SEED)
        return GPT(config(self.model), seed=SEED)

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's rows of the first global batches."""
        if self.model == "mlp":
            data = dataset("digits")
        else:
            data = dataset("bytes", length=config(self.model).context, limit=self.rows * steps)
        share = {"rank": md.rank(), "ranks": md.size(), "seed": SEED}
        sampler = Sampler(len(data.train), self.rows, drop_last=True, **share)
        return [data.train[sampler.share(step)] for step in range(steps)]


@dataclass(frozen=True)
class Timed:
    """One rank's measurement; the lists have one item per round, times in seconds."""

    ours: list[float]
    peer: list[float]
    our_losses: list[float]  # means over the global batch
    peer_losses: list[float]  # means over this rank's rows
    bytes_per_step: int  # sent by this rank in one of our steps
    comm_overlap: float  # share of our communication's time that was hidden, in that step


def time_steps(case: Case, rounds: int) -> Timed:
    """Train in turns by our engine and by plain torch, on the same rows from the same weights."""
    return time_forms(case, {"ours": {}}, rounds)["ours"]


def time_forms(case: Case, forms: Mapping[str, Mapping[str, Any]], rounds: int) -> dict[str, Timed]:
    """Train in turns by our engine in several forms and by plain torch, on the same rows from equal weights.

    forms: options of `DataParallel` for each name.
    """
    batches = case.batches(rounds + 2)  # one more for time_in_turns to warm up, and one for the ledger
    engines = {
        name: md.prepare(case.build(), ADAMW, md.Layout(dp=md.size()), data_parallel=options, rehearse=False)
        for name, options in forms.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in (*engines, "")}
    peer_step = _plain_torch(case.build(), ADAMW)

    def step(name: str, train: Callable[[Tensor, Tensor], float]) -> Callable[[], None]:
        return lambda: losses[name].append(train(*batches[len(losses[name])]))

    programs = {name: step(name, engine.step) for name, engine in engines.items()}
    seconds = time_in_turns({**programs, "": step("", peer_step)}, rounds)
    timed = {}
    for name, engine in engines.items():
        with comm.ledger() as ledger:
            engine.step(*batches[-1])
        timed[name] = Timed(
            seconds[name], seconds[""], losses[name], losses[""], ledger.bytes_sent, ledger.comm_overlap
        )
    return timed


def _plain_torch(
    model: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer]
) -> Callable[[Tensor, Tensor], float]:
    if md.size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return plain_loop(model, make_optimizer(model.parameters()))


def plain_loop(model: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], float]:
    """Return a training step as torch's users write it."""

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step
