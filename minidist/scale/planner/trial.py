"""Time real steps of several layouts on this machine, and compare them with predictions.

All layouts take the same random tokens from the same weights. They take a step each in turn in one launch, so
a machine that slows down does so for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch

from minidist import comm
from minidist.comm.launching.launch import launch
from minidist.kernels.measure.timing_in_turns import time_in_turns
from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.gpt import GPT
from minidist.model.sampler import Sampler
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.prepare import prepare
from minidist.parallel.engine.training_step import Engine
from minidist.scale.dryrun.one_rank import OPTIMIZERS
from minidist.scale.dryrun.own_model import OwnModel
from minidist.scale.dryrun.transformer import subject_of
from minidist.scale.planner.candidates import Candidate

TIMEOUT = 540.0
MOST_PARAMETERS = 50_000_000
NEAR = 0.3
"""By how much a prediction may be off."""


def require_trainable(model: object) -> GPTConfig:
    """The shape of a GPT that is small enough to train here; ValueError for any other model."""
    subject = subject_of(model)
    if isinstance(subject, OwnModel):
        raise ValueError(
            f"--measure trains a GPT of this package, and {subject.name} is a model of your own; leave it "
            "out, and time the answer with minidist train --layout"
        )
    if not isinstance(subject.shape, GPTConfig):
        raise ValueError(
            "--measure trains the model, and a BERT's shape is for estimates only; give a GPT, such as "
            "byte-small"
        )
    if subject.parameters() > MOST_PARAMETERS:
        raise ValueError(
            f"--measure trains the model on this machine, and it has {subject.parameters():,} parameters; "
            f"give one of at most {MOST_PARAMETERS:,}, such as byte-small"
        )
    return subject.shape


def trial(
    model: str | TransformerConfig | OwnModel,
    layouts: Sequence[Layout],
    batch: tuple[int, int],
    *,
    rounds: int = 9,
    optimizer: str = "adam",
) -> dict[str, float]:
    """Measure the seconds of a step of each layout: the slowest rank's, the median over `rounds` steps.

    All layouts have the same number of ranks, launched once. `batch` is the rows of the global batch
    and the tokens in each row. `optimizer` is "adam", "muon", "momentum" or "sgd".
    """
    shape = require_trainable(model)
    sizes = {layout.ranks for layout in layouts}
    if len(sizes) != 1:
        raise ValueError(
            f"the layouts have {sorted(sizes)} ranks; give layouts with the same number of ranks"
        )
    everyones = launch(in_rank, sizes.pop(), (shape, list(layouts), batch, rounds, optimizer), TIMEOUT)
    return {
        name: statistics.median(max(times) for times in zip(*(each[name] for each in everyones), strict=True))
        for name in everyones[0]
    }


def in_rank(
    shape: GPTConfig, layouts: Sequence[Layout], batch: tuple[int, int], rounds: int, optimizer: str
) -> dict[str, list[float]]:
    """On each rank: measure the seconds of each step, by the layout's text."""
    make = OPTIMIZERS["adamw" if optimizer == "adam" else optimizer]  # predictions count AdamW's decay
    engines: dict[str, Engine] = {
        str(layout): prepare(GPT(shape), make, layout, rehearse=False) for layout in layouts
    }
    rows, tokens = batch
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, shape.vocabulary, (rows, tokens + 1), generator=generator)

    def step(engine: Engine) -> None:
        own = Sampler(rows, rows, rank=engine.data_rank, ranks=engine.data_ranks).share(0)
        engine.step(text[own, :-1].contiguous(), text[own, 1:].contiguous())
        comm.barrier()

    for engine in engines.values():
        step(engine)  # the first step makes the buckets and counts the activations
    return time_in_turns({name: partial(step, engine) for name, engine in engines.items()}, rounds)


def verdict(candidates: Sequence[Candidate], measured: dict[str, float]) -> str:
    """Say in a sentence how well the predictions agree with the measurements."""
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
        "the answer was the fastest of them"
        if fastest is first
        else f"{fastest[0].layout} was the fastest, at {fastest[2] / first[2]:.2f} of the answer's time"
    )
    return (
        f"Measured: predictions were {min(ratios):.2f} to {max(ratios):.2f} of the measured times, {inside} "
        f"of {len(ratios)} within {NEAR:.0%} (the worst {worst:.2f}); {order}."
    )
