"""One step of a layout, traced on all ranks: what `minidist trace` runs.

>>> trace_layout(md.Layout.parse("dp=2,pp=2,micro_batches=4")).save("trace.json")
"""

from __future__ import annotations

from functools import partial

from minidist import comm
from minidist._arguments import check_whole
from minidist.cli.train_config import OPTIMIZERS, TrainConfig, build, config_of, example_of, loss_of
from minidist.comm.launching.launch import launch
from minidist.model import Sampler
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.prepare import prepare
from minidist.scale.tracing.trace import Trace, trace


def trace_layout(
    layout: Layout,
    model: str = "gpt",
    *,
    steps: int = 3,
    batch: int = 32,
    learning_rate: float = 3e-3,
    optimizer: str = "adamw",
    dtype: str = "float32",
    seed: int = 0,
    timeout: float | None = None,
    data: str | None = None,
    loss: str | None = None,
) -> Trace:
    """Train for `steps` steps on new ranks, which create what is made on first use, then trace one step.

    `model` is "mlp", which learns digits, the name of a GPT of bytes, or your own, with `data` and `loss`, as
    in own_model.py. `timeout` is the most seconds.
    """
    check_whole("steps", steps, 0)
    fields = {"learning_rate": learning_rate, "optimizer": optimizer, "dtype": dtype, "seed": seed}
    config = config_of(model, layout, data=data, loss=loss, steps=steps + 1, batch=batch, **fields)
    found: Trace | None = launch(traced, layout.ranks, (config,), timeout)[0]
    assert found is not None  # rank 0 has it
    return found


def traced(config: TrainConfig) -> Trace | None:
    """On each rank: train, and trace the last step."""
    model, data = build(config)
    optimizer = partial(OPTIMIZERS[config.optimizer], lr=config.learning_rate)
    example = example_of(config, data)
    engine = prepare(model, optimizer, config.layout, loss_of(config), example=example, rehearse=False)
    sampler = Sampler(
        len(data.train), config.batch, rank=engine.data_rank, ranks=engine.data_ranks, seed=config.seed
    )
    for step in range(config.steps):
        inputs, targets = data.train[sampler.share(step)]
        if step < config.steps - 1:
            engine.step(config.converted(inputs), targets)
    comm.barrier()
    with trace(engine) as t:
        engine.step(config.converted(inputs), targets)
    return t.gather()
