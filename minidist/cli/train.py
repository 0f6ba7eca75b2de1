"""Train from a description on the ranks of its layout, compare two layouts, or trace a step of one.

>>> from minidist.cli.train import TrainConfig, train
>>> md.launch(train, ranks=2, args=(TrainConfig(layout=md.Layout(dp=2)),))
>>> print(compare_layouts(config_of("gpt", md.Layout()), config_of("gpt", md.Layout(dp=2, zero=1))))

`_train` is an example of a training loop; train_config.py has the descriptions.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist import comm
from minidist._stopping import INTERRUPTED, Stopped, give_up, termination
from minidist.checkpoint import checkpoints
from minidist.checkpoint.folders import end_writing
from minidist.cli.resuming import Resuming, check_same, how_to_continue, lock, reserved
from minidist.cli.train_config import TrainConfig as TrainConfig
from minidist.cli.train_config import build, engine_of
from minidist.comm.errors import RankDied
from minidist.comm.launching.cluster import Cluster
from minidist.comm.launching.launch import launch
from minidist.comm.started_by import started as started_by
from minidist.model import Rows, Sampler, accuracy, masked_accuracy
from minidist.parallel.debugging.compare import Comparison, differences
from minidist.parallel.debugging.recording import Recording, record
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.gathering import raw_bytes
from minidist.scale.trace.tracer import Trace, trace

TEST_ROWS = 512
"""The most held-out rows in an evaluation: the digits have fewer, the corpus many more."""


@dataclass(frozen=True)
class TrainResult:
    """How a training went; the same on every rank except for `seconds`, its rate and `bytes_sent`."""

    losses: list[float]  # mean over each global batch, including steps of earlier runs
    test_loss: float  # NaN if it was stopped
    test_accuracy: float
    parameters: int
    seconds: float  # of the steps alone, on this rank
    rows_per_second: float
    bytes_sent: int  # by this rank, in the steps of this run
    stopped: bool = False  # whether SIGTERM ended it, with everything saved
    resumed_at: int = 0  # steps of earlier runs


def run(config: TrainConfig, timeout: float | None = None, progress: bool = True) -> TrainResult:
    """Train on as many new local ranks as the layout needs, or on those that a launcher has started.

    With `config.save`, SIGTERM to this process or to a rank saves and stops at the end of a step.

    Args:
        config: what to train.
        timeout: seconds that the whole run may take; None for no limit.
        progress: draw a progress bar if standard error is a terminal.

    Raises:
        RankError: a rank failed; the message says which and why.
        ValueError: the folder for checkpoints cannot be written, another run saves there, or it has another
            training's checkpoints.
        Stopped: SIGTERM came before the training began, or after its end; or Ctrl-C, with `config.save`.
    """
    results: list[TrainResult]
    try:
        if config.save is None or started_by() is not None:
            results = launch(train, config.layout.ranks, (config, progress), timeout)
        else:
            # Refuse the folder before ranks start, if it is to be refused.
            end_writing(lock(os.path.abspath(config.save)))
            check_same(config.save, config.description, config.resume)
            started: Cluster | None = None
            with termination(lambda: give_up() if started is None else started.signal(signal.SIGTERM)):
                try:
                    with Cluster(config.layout.ranks, timeout) as started:
                        results = started.run(train, config, progress)
                except RankDied as death:
                    if death.signal != "SIGTERM":
                        raise
                    if not checkpoints(config.save):
                        give_up()
                    how = how_to_continue(config.save, config.resume)
                    raise Stopped(f"stopped by SIGTERM; {how}") from death
    except KeyboardInterrupt:
        if config.save is None:
            raise
        raise Stopped(f"stopped; {how_to_continue(config.save, config.resume)}", INTERRUPTED) from None
    return results[0]


def train(config: TrainConfig, progress: bool = False) -> TrainResult:
    """Train on this rank, together with the other ranks of the world.

    Raises:
        ValueError: the world does not fit the layout, a batch has fewer rows than there are ranks, the folder
            for checkpoints cannot be written, or another run saves there.
        RuntimeError: the ranks read different data, or end with different weights.
    """
    with _progress(config, progress and comm.rank() == 0) as advance:
        if config.save is None:
            return _train(config, advance, lambda: False)
        with termination() as asked, reserved(os.path.abspath(config.save)):
            return _train(config, advance, asked)


def _train(
    config: TrainConfig, advance: Callable[[float, int], None], asked: Callable[[], bool]
) -> TrainResult:
    """Train; `advance` is called after each step, and `asked` returns whether this rank was asked to stop."""
    model, data = build(config)
    _require_equal("data set", data.fingerprint(), "install the same Python and scikit-learn on all machines")
    if config.batch > len(data.train):
        raise ValueError(
            f"batch is {config.batch}, and {config.data} has {len(data.train)} rows; give at most so many"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())  # before `prepare` divides it
    engine = engine_of(config, model, data)
    sampler = Sampler(
        len(data.train),
        config.batch,
        rank=engine.data_rank,
        ranks=engine.data_ranks,
        seed=config.seed,
        drop_last=True,  # otherwise an epoch could end in a batch too small for the ranks
    )
    resuming, losses, rows, stopped = None, list[float](), 0, False
    if config.save is not None:
        folder = os.path.abspath(config.save)
        resuming = Resuming(engine, sampler, folder, config.save_every, config.keep, config.description)
    with comm.ledger() as ledger:
        if resuming is not None:
            losses = resuming.losses(config.resume)
        resumed_at = len(losses)
        started, sent = time.perf_counter(), ledger.bytes_sent
        for step in range(resumed_at, config.steps):
            inputs, targets = data.train[sampler.share(step)]
            losses.append(engine.step(config.converted(inputs), targets))
            rows += len(sampler.batch(step))
            advance(losses[-1], step + 1)
            if resuming is not None:
                stopped = resuming.step_done(losses, step + 1 == config.steps, asked())
                if stopped:
                    break
        seconds = time.perf_counter() - started
        sent = ledger.bytes_sent - sent
    _require_equal("final weights", _fingerprint(engine.whole()), "this is a bug in the strategy")
    return TrainResult(
        losses=losses,
        test_loss=math.nan if stopped else evaluate(engine, data.test, config, None),
        test_accuracy=evaluate(engine, data.test, config, masked_accuracy if config.masks else accuracy)
        if data.classes and config.loss is None and not stopped
        else math.nan,
        parameters=parameters,
        seconds=seconds,
        rows_per_second=rows / seconds,
        bytes_sent=sent,
        stopped=stopped,
        resumed_at=resumed_at,
    )


def evaluate(
    engine: Engine, rows: Rows, config: TrainConfig, metric: Callable[[Tensor, Tensor], Tensor] | None
) -> float:
    """The mean of a metric over the first held-out rows; each data-parallel rank takes a share of them."""
    count = min(len(rows), TEST_ROWS)
    total = 0.0
    for start in range(0, count, config.batch):
        batch = range(start, min(start + config.batch, count))
        first, last = (len(batch) * (engine.data_rank + i) // engine.data_ranks for i in (0, 1))
        inputs, targets = rows[slice(start + first, start + last)]
        total += engine.evaluate(config.converted(inputs), targets, metric) * len(batch)
    return total / count


def _fingerprint(state: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in state:
        digest.update(name.encode())
        digest.update(raw_bytes(value))
    return digest.hexdigest()


def _require_equal(what: str, fingerprint: str, remedy: str) -> None:
    """RuntimeError, on every rank, if ranks have different fingerprints (64 hexadecimal digits)."""
    everyones = comm.all_gather(torch.tensor([int(fingerprint[:15], 16)], device=comm.device())).tolist()
    different = [rank for rank, each in enumerate(everyones) if each != everyones[0]]
    if different:
        raise RuntimeError(f"the {what} of rank {different[0]} is not that of rank 0: {remedy}")


@contextmanager
def _progress(config: TrainConfig, wanted: bool) -> Iterator[Callable[[float, int], None]]:
    """A function to call with each step's loss; it moves a progress bar if standard error is a terminal.

    The bar is there from the start, since to build and rehearse a model takes seconds.
    """
    if not wanted or not os.isatty(2):
        yield lambda loss, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    # Write to the descriptor, since a rank's sys.stderr forwards whole lines to the caller.
    with os.fdopen(os.dup(2), "w", errors="replace") as terminal:
        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[told]}"
        with Progress("{task.description}", *columns, console=Console(file=terminal)) as bar:
            name = f"{config.model_name} on {config.data}"
            task = bar.add_task(name, total=config.steps, told="preparing")
            yield lambda loss, done: bar.update(task, completed=done, told=f"loss {loss:.4f}")


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
    batches = [data.train[sampler.batch(step)] for step in range(config.steps)]
    recording = record(engine, [(config.converted(inputs), targets) for inputs, targets in batches])
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
    rank, ranks = engine.data_rank, engine.data_ranks
    sampler = Sampler(len(data.train), config.batch, rank=rank, ranks=ranks, seed=config.seed)
    *earlier, last = (data.train[sampler.share(step)] for step in range(config.steps))
    for inputs, targets in earlier:
        engine.step(config.converted(inputs), targets)
    comm.barrier()
    with trace(engine) as t:
        engine.step(config.converted(last[0]), last[1])
    return t.gather()
