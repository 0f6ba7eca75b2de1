"""Layouts tried for real on this machine, in turns, beside what was predicted.

All take the same random tokens from the same weights, in one launch, a step each in turn, so that a machine
that slows down meanwhile does so for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch

from minidist import comm
from minidist.comm.launching.launch import launch
from minidist.kernels.measure.harness import time_in_turns
from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.gpt import GPT
from minidist.model.sampler import Sampler
from minidist.parallel.contract.engine import Engine, MakeOptimizer
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.prepare import prepare
from minidist.scale.planning.candidates import Candidate

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": partial(torch.optim.AdamW, lr=1e-4),
    "momentum": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-4),
}
TIMEOUT = 540.0
MOST_PARAMETERS = 50_000_000
NEAR = 0.3
"""How far a prediction may be off."""


def require_trainable(shape: TransformerConfig) -> None:
    """ValueError where a model is no GPT, or not small enough to be run here."""
    if not isinstance(shape, GPTConfig):
        raise ValueError(
            "--measure trains the model, and a BERT's shape is for reckoning only; give a GPT, such as "
            "byte-small"
        )
    if shape.parameters() > MOST_PARAMETERS:
        raise ValueError(
            f"--measure trains the model on this machine, and it has {shape.parameters():,} parameters; give "
            f"one of at most {MOST_PARAMETERS:,}, such as byte-small"
        )


def trial(
    shape: TransformerConfig,
    layouts: Sequence[Layout],
    batch: tuple[int, int],
    *,
    rounds: int = 9,
    optimizer: str = "adam",
) -> dict[str, float]:
    """Seconds of a step of each layout, the median over rounds of the slowest rank's.

    Args:
        shape: of a GPT.
        layouts: all of the same number of ranks, which are launched once.
        batch: rows of the global batch, and tokens in each.
        rounds: steps of each, in turns, after two that warm up.
        optimizer: "adam", "momentum" or "sgd".

    Raises:
        ValueError: layouts of different numbers of ranks, or a model that is no GPT.
        RankError: a rank failed.
    """
    require_trainable(shape)
    sizes = {layout.ranks for layout in layouts}
    if len(sizes) != 1:
        raise ValueError(f"the layouts have {sorted(sizes)} ranks; give such as have the same number")
    everyones = launch(in_rank, sizes.pop(), (shape, list(layouts), batch, rounds, optimizer), TIMEOUT)
    return {
        name: statistics.median(max(times) for times in zip(*(each[name] for each in everyones), strict=True))
        for name in everyones[0]
    }


def in_rank(
    shape: TransformerConfig, layouts: Sequence[Layout], batch: tuple[int, int], rounds: int, optimizer: str
) -> dict[str, list[float]]:
    """On each rank: seconds of each step by the layout's text."""
    engines: dict[str, Engine] = {
        str(layout): prepare(GPT(shape), OPTIMIZERS[optimizer], layout) for layout in layouts
    }
    rows, tokens = batch
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, shape.vocabulary, (rows, tokens + 1), generator=generator)

    def step(engine: Engine) -> None:
        own = Sampler(rows, rows, rank=engine.data_rank, ranks=engine.data_ranks).share(0)
        engine.step(text[own, :-1].contiguous(), text[own, 1:].contiguous())
        comm.barrier()

    for engine in engines.values():
        step(engine)  # the first makes the buckets, and counts the activations
    return time_in_turns({name: partial(step, engine) for name, engine in engines.items()}, rounds)


def verdict(candidates: Sequence[Candidate], measured: dict[str, float]) -> str:
    """How well what was measured had been predicted, in a sentence or two."""
    pairs = [
        (c, c.step.seconds, measured[str(c.layout)])
        for c in candidates
        if c.step and str(c.layout) in measured
    ]
    ratios = [predicted / took for _, predicted, took in pairs]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    inside = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    fastest = min(pairs, key=lambda pair: pair[2])
    first = pairs[0]
    order = (
        "the answer was the fastest of them, too"
        if fastest is first
        else f"{fastest[0].layout} was the fastest, at {fastest[2] / first[2]:.2f} of the answer's time"
    )
    return (
        f"Measured: predictions were {min(ratios):.2f} to {max(ratios):.2f} of what the steps took, {inside} "
        f"of {len(ratios)} within {NEAR:.0%} (the worst {worst:.2f}); {order}."
    )
