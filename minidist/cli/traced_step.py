"""One step of a layout, traced on all ranks: what `minidist trace` runs.

>>> trace_layout(md.Layout.parse("dp=2,pp=2,micro_batches=4")).save("trace.json")
"""

from __future__ import annotations

from functools import partial

from minidist import comm
from minidist.cli.train_config import DEFAULT_MODEL, OPTIMIZERS, TrainConfig, build
from minidist.comm.launching.launch import launch
from minidist.model import Sampler
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.prepare import prepare
from minidist.scale.tracing.all_ranks import Trace
from minidist.scale.tracing.trace import trace


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
) -> Trace:
    """Train for some steps, which start what is made when it is first used, then trace one.

    Args:
        layout: how many ranks do what; they are started fresh.
        model: "mlp", which learns digits, or a GPT of bytes by name; "gpt" is the smallest.
        steps: before the one that is traced; with 0 that is the first.
        batch, learning_rate, optimizer, dtype, seed: as for `TrainConfig`.
        timeout: seconds that the launch may take; None for no limit.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: an unknown name, a number out of range, or a layout that does not fit.
        RankError: a rank failed; the message says which and why.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps is {steps!r}; give a whole number")
    if steps < 0:
        raise ValueError(f"steps is {steps}; give how many to take before the one that is traced, or 0")
    config = TrainConfig(
        data="digits" if model == "mlp" else "bytes",
        model=DEFAULT_MODEL["bytes"] if model == "gpt" else model,
        layout=layout,
        steps=steps + 1,
        batch=batch,
        learning_rate=learning_rate,
        optimizer=optimizer,
        dtype=dtype,
        seed=seed,
    )
    found: Trace | None = launch(traced, layout.ranks, (config,), timeout)[0]
    assert found is not None  # rank 0 has it
    return found


def traced(config: TrainConfig) -> Trace | None:
    """On each rank: train, and trace the last step."""
    model, data = build(config)
    engine = prepare(model, partial(OPTIMIZERS[config.optimizer], lr=config.learning_rate), config.layout)
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
