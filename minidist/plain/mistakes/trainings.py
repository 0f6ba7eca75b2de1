"""The trainings that detectors look at: a rung with its changed lines on n ranks, or what is right beside it.

The model is the ladder's GPT in float64. The tokens of a row go up in steps of its own, with some noise, so
that there is something to learn. Ranks start from different weights, as they do where nobody broadcasts.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.debugging import detectors
from minidist.parallel.debugging.detectors import ADAMW, SHORT, Counter, Run
from minidist.plain import gpt
from minidist.plain.gpt import Batch, MakeOptimizer
from minidist.plain.mistakes import Mistake, recipe
from minidist.plain.mistakes.ranks import Rank, on_ranks

T, VOCABULARY = 12, 64


class Dropout(nn.Module):
    """Drops a tenth of the elements, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        """Set elements to 0."""
        return recipe.dropped(x, self.generator)


class Positioned(nn.Embedding):
    """An embedding that adds a token's position. The first token's is `start`."""

    start = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors of tokens and positions."""
        positions = torch.arange(self.start, self.start + x.shape[1])[:, None]
        rates = torch.arange(1, self.embedding_dim + 1) / self.embedding_dim
        return super().forward(x) + (positions * rates).sin().to(self.weight)


def model_of(kind: str, seed: int, layers: int = 2, **sizes: int) -> nn.Sequential:
    """Build the GPT: as it is, with dropout, with positions, or with one matrix as embedding and head."""
    model = gpt.gpt(layers, seed=seed, **sizes).double()
    if kind == "dropout":
        model.insert(1, Dropout())
    elif kind == "positions":
        model[0].__class__ = Positioned
    elif kind == "tied":
        model[-1].weight = model[0].weight
    return model


def batches_of(steps: int, rows: int, padded: bool = False, seed: int = 0) -> list[Batch]:
    """Draw batches; `padded` rows have targets of -1 at their ends."""
    generator, batches = torch.Generator().manual_seed(seed + 1), []
    for _ in range(steps):
        start, stride, end = torch.randint(VOCABULARY, (3, rows, 1), generator=generator)
        noise = torch.rand((rows, T + 1), generator=generator) < 0.1
        tokens = (start + (stride % 4 + 1) * torch.arange(T + 1) + 7 * noise) % VOCABULARY
        targets = tokens[:, 1:].masked_fill((torch.arange(T) >= end % (T - 2) + 2) & padded, -1)
        batches.append((tokens[:, :-1], targets))
    return batches


def load(rung: Mistake, comm: Any) -> types.ModuleType:
    """Return a rung with its changed lines, for one rank."""
    module = types.ModuleType(rung.rung)
    exec(compile(rung.source(), f"<{rung.rung}>", "exec"), module.__dict__)
    names = {**vars(gpt), "comm": comm}
    same_weights = types.FunctionType(gpt.same_weights.__code__, names, "same_weights", (0,))
    module.__dict__.update(comm=comm, same_weights=same_weights)
    return module


def run(
    rung: Mistake, n: int, steps: int, make: MakeOptimizer = ADAMW, counted: bool = False, parts: int = 0,
    seed: int = 0,
) -> Run:  # fmt: skip
    """Train on n ranks. parts: in how many it is cut, each from the checkpoint of the one before."""
    batches = batches_of(steps, rung.rows, rung.rung == "recipe", seed)
    models = [model_of(rung.model, seed + rank) for rank in range(n)]
    saved: list[dict[str, Any]] = [{} for _ in range(n)]
    counters = [Counter() for _ in range(n)]

    def train(comm: Rank) -> list[float]:
        rank, losses = comm.number, list[float]()
        given = partial(counters[rank].optimizer, make, models[rank]) if counted else make
        for part in range(1, max(parts, 1) + 1):
            if part > 1:
                models[rank] = model_of(rung.model, seed + rank)
            options = dict(rung.options)
            if parts:
                options |= {"saved": saved[rank], "stop": steps * part // parts}
            with counters[rank].counting() if counted else nullcontext():
                losses += load(rung, comm).train(models[rank], batches, given, **options)
        return losses

    torch.manual_seed(0)
    results, ranks, failed = on_ranks(n, train)
    messages = [key for key in ranks[0].world.rows if key[0] != "all"]
    return Run(
        results[0] or [],
        [{name: p.detach() for name, p in model.named_parameters()} for model in models],
        [rank.calls for rank in ranks],
        [counter.work for counter in counters],
        [counter.most + counter.kept for counter in counters],
        sum(number > ranks[way[1]].count[way] for way, number in messages),
        failed,
        [counter.kept for counter in counters],
    )


RUNS = detectors.RUNS | {"whole": {"steps": SHORT, "parts": 1}, "resumed": {"steps": SHORT, "parts": 2}}


@dataclass
class Trainings:
    """A rung's trainings on n ranks, each run when a detector asks for it first."""

    rung: Mistake
    n: int = 2
    seed: int = 0  # of the weights and the data
    runs: dict[str, Run] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Run:
        """Return one of RUNS."""
        if name not in self.runs:
            self.runs[name] = run(self.rung, self.n, **RUNS[name], seed=self.seed)
        return self.runs[name]


@cache
def unchanged(rung: Mistake, n: int = 2, seed: int = 0) -> Trainings:
    """The rung without lines that are wrong."""
    return Trainings(rung, n, seed)


@cache
def alone(rung: Mistake, n: int = 2, seed: int = 0) -> Trainings:
    """What a rung has to equal: one process; local SGD, which computes something else, itself."""
    if rung.rung == "local_sgd":
        return unchanged(rung, n, seed)
    itself = rung.rung in ("recipe", "experts", "muon", "low_precision")
    return Trainings(rung if itself else replace(rung, rung="one_process", options=()), 1, seed)
