"""Two layouts of a model and data set that are here, compared: what `minidist compare` runs.

>>> print(compare_layouts(md.Layout(), md.Layout(dp=2, zero=1)))
"""

from __future__ import annotations

from functools import partial

import torch

from minidist import comm
from minidist.cli.train_config import DEFAULT_MODEL, TrainConfig, build
from minidist.comm.launching.launch import launch
from minidist.model import Sampler
from minidist.parallel.contract.layout import Layout
from minidist.parallel.debugging.compare import Comparison, differences
from minidist.parallel.debugging.recording import Recording, record
from minidist.parallel.engine.prepare import prepare


def compare_layouts(
    a: Layout,
    b: Layout,
    model: str = "gpt",
    *,
    steps: int = 2,
    batch: int = 8,
    learning_rate: float = 0.1,
    dtype: str = "float32",
    seed: int = 0,
    timeout: float | None = None,
) -> Comparison:
    """Take two layouts through the same batches, each in a launch of its own, and compare them.

    The optimizer is plain SGD, whose updates are the gradients times the learning rate.

    Args:
        a, b: the layouts, of any numbers of ranks.
        model: "mlp", which learns digits, or a GPT of bytes by name; "gpt" is the smallest.
        steps, batch, learning_rate, dtype, seed: as for `TrainConfig`.
        timeout: seconds that each launch may take; None for no limit.

    Raises:
        ValueError: an unknown name, a number out of range, or a layout that does not fit.
        RankError: a rank failed; the message says which and why.
    """
    configs = [
        TrainConfig(
            data="digits" if model == "mlp" else "bytes",
            model=DEFAULT_MODEL["bytes"] if model == "gpt" else model,
            layout=layout,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            optimizer="sgd",
            dtype=dtype,
            seed=seed,
        )
        for layout in (a, b)
    ]
    found = [launch(_record, config.layout.ranks, (config,), timeout)[0] for config in configs]
    return differences(*found)


def _record(config: TrainConfig) -> Recording | None:
    """On each rank; what rank 0 returns is the same on all."""
    model, data = build(config)
    engine = prepare(model, partial(torch.optim.SGD, lr=config.learning_rate), config.layout)
    sampler = Sampler(len(data.train), config.batch, seed=config.seed, drop_last=True)
    batches = []
    for step in range(config.steps):
        inputs, targets = data.train[sampler.batch(step)]
        batches.append((config.converted(inputs), targets))
    recording = record(engine, batches)
    return recording if comm.rank() == 0 else None
