"""What `minidist compare` and `minidist trace` run: a few steps of a training, recorded or traced.

>>> print(compare_layouts(config_of("gpt", md.Layout()), config_of("gpt", md.Layout(dp=2, zero=1))))
"""

from __future__ import annotations

from minidist import comm
from minidist.cli.train_config import TrainConfig, build, engine_of
from minidist.comm.launching.launch import launch
from minidist.model import Sampler
from minidist.parallel.debugging.compare import Comparison, differences
from minidist.parallel.debugging.recording import Recording, record
from minidist.scale.tracing.trace import Trace, trace


def compare_layouts(a: TrainConfig, b: TrainConfig, timeout: float | None = None) -> Comparison:
    """Train in two layouts on the same batches, each in its own launch, and compare them.

    The optimizer has to be plain SGD, whose updates are the gradients times the learning rate. `timeout` is
    the most seconds of each launch.
    """
    return differences(*(launch(recorded, each.layout.ranks, (each,), timeout)[0] for each in (a, b)))


def recorded(config: TrainConfig) -> Recording | None:
    """On each rank: train, and record every step. All ranks make the same recording; rank 0 returns it."""
    model, data = build(config)
    engine = engine_of(config, model, data, rehearse=False)
    sampler = Sampler(len(data.train), config.batch, seed=config.seed, drop_last=True)
    batches = []
    for step in range(config.steps):
        inputs, targets = data.train[sampler.batch(step)]
        batches.append((config.converted(inputs), targets))
    recording = record(engine, batches)
    return recording if comm.rank() == 0 else None


def trace_layout(config: TrainConfig, timeout: float | None = None) -> Trace:
    """Train on new ranks, and trace the last step; the steps before it create what is made on first use."""
    found: Trace | None = launch(traced, config.layout.ranks, (config,), timeout)[0]
    assert found is not None  # rank 0 has it
    return found


def traced(config: TrainConfig) -> Trace | None:
    """On each rank: train, and trace the last step."""
    model, data = build(config)
    engine = engine_of(config, model, data, rehearse=False)
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
