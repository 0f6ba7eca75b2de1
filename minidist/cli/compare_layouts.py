"""Compare two layouts on one of minidist's own models: what `minidist compare` runs.

>>> print(compare_layouts(md.Layout(), md.Layout(dp=2, zero=1)))
"""

from __future__ import annotations

from functools import partial

import torch

from minidist import comm
from minidist.cli.train_config import TrainConfig, build, config_of, example_of, loss_of
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
    data: str | None = None,
    loss: str | None = None,
) -> Comparison:
    """Train two layouts on the same batches, each in its own launch, and compare them.

    `model` is "mlp", which learns digits, the name of a GPT of bytes, or your own, with `data` and `loss`, as
    in own_model.py. The optimizer is plain SGD, whose
    updates are the gradients times the learning rate. `timeout` is the most seconds of each launch.
    """
    fields = {"steps": steps, "batch": batch, "learning_rate": learning_rate, "dtype": dtype, "seed": seed}
    configs = [config_of(model, layout, data=data, loss=loss, optimizer="sgd", **fields) for layout in (a, b)]
    found = [launch(_record, config.layout.ranks, (config,), timeout)[0] for config in configs]
    return differences(*found)


def _record(config: TrainConfig) -> Recording | None:
    """On each rank: train, and record every step. All ranks make the same recording; rank 0 returns it."""
    model, data = build(config)
    optimizer = partial(torch.optim.SGD, lr=config.learning_rate)
    example = example_of(config, data)
    engine = prepare(model, optimizer, config.layout, loss_of(config), example=example, rehearse=False)
    sampler = Sampler(len(data.train), config.batch, seed=config.seed, drop_last=True)
    batches = []
    for step in range(config.steps):
        inputs, targets = data.train[sampler.batch(step)]
        batches.append((config.converted(inputs), targets))
    recording = record(engine, batches)
    return recording if comm.rank() == 0 else None
