"""Train from a description: what the commands train, compare and trace run; an example of a training loop.

>>> from minidist.cli.train import TrainConfig, train
>>> md.launch(train, ranks=2, args=(TrainConfig(layout=md.Layout(dp=2)),))
>>> print(compare_layouts(config_of("gpt", md.Layout()), config_of("gpt", md.Layout(dp=2, zero=1))))

Two runs with equal descriptions train on the same batches from the same weights, whatever their layouts.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist._arguments import check_whole
from minidist._names import unknown
from minidist._stopping import Stopped, give_up, termination
from minidist.checkpoint import checkpoints
from minidist.cli.own_model import function, is_own, require_data
from minidist.cli.resuming import Resuming, reserved
from minidist.comm.errors import RankDied
from minidist.comm.launchers import started as started_by
from minidist.comm.launching.cluster import Cluster
from minidist.comm.launching.launch import launch
from minidist.model import (
    BERT,
    CONFIGS,
    GPT,
    MLP,
    BERTConfig,
    Dataset,
    GPTConfig,
    Rows,
    Sampler,
    accuracy,
    dataset,
    masked,
    masked_accuracy,
)
from minidist.model import config as shape_of
from minidist.model.loss import cross_entropy, masked_cross_entropy
from minidist.parallel.contract.layout import Layout, check_available
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.debugging.compare import Comparison, differences
from minidist.parallel.debugging.recording import Recording, record
from minidist.parallel.engine.prepare import prepare
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.training.clipping import check_max_norm
from minidist.scale.dry_run.run import OPTIMIZERS
from minidist.scale.tracing.trace import Trace, trace

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEFAULT_MODEL = {"digits": "mlp", "bytes": "byte-tiny"}
MODELS = ("mlp", *(name for name, shape in CONFIGS.items() if shape.generates))
BERT_ROW = 128
"""Bytes in a row of a BERT."""
HIDDEN = 128
"""Width of the MLP's hidden layer."""


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run; making one raises ValueError for what is unknown or does not fit."""

    data: str = "digits"  # or "bytes", or a function's name, as in own_model.py
    model: str | None = (
        None  # "mlp" for digits; a GPT's name for bytes; your own; None for the data's default
    )
    layout: Layout = field(default_factory=Layout)
    steps: int = 230  # global batches; on the digits, 230 of 64 rows are ten epochs
    batch: int = 64  # rows of a global batch, over all data-parallel ranks
    learning_rate: float = 3e-3
    optimizer: str = "adamw"
    rung: str | None = None  # the matmul rung that the MLP's layers run on; None for torch's product
    dtype: str = "float32"
    seed: int = 0  # of the weights and of the order of rows
    clip_norm: float | None = None  # the largest norm that gradients may have; None for any
    loss: str | None = None  # a function's name; None for cross entropy
    save: str | None = None  # a folder for checkpoints, from which a stopped run continues
    save_every: int = 50  # steps from one checkpoint to the next; the end is saved as well
    keep: int = 3  # how many of the newest checkpoints to keep
    resume: bool = True  # continue from the newest whole checkpoint; False refuses a folder that has some

    def __post_init__(self) -> None:
        own = is_own(self.model)
        for what, name, known in (
            ("data set", self.data, DEFAULT_MODEL),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("dtype", self.dtype, DTYPES),
            ("model", self.model_name, MODELS),
        ):
            if name not in known and not (own and what in ("data set", "model")):
                raise unknown(what, name, known)
        if own:
            function("--model", str(self.model))
            function("--data", require_data(str(self.model), self.data))
        if self.loss is not None:
            function("--loss", self.loss)
        if not own and (self.data == "digits") != (self.model_name == "mlp"):
            texts = f"a GPT, such as {DEFAULT_MODEL['bytes']}, or a BERT, such as bert-tiny-mlm"
            fitting = "the mlp" if self.data == "digits" else texts
            raise ValueError(f"the model {self.model_name} cannot train on {self.data}; give {fitting}")
        if self.rung is not None:
            from minidist.kernels import rung

            rung(self.rung)
            if self.model_name != "mlp":
                raise ValueError(
                    f"a rung ({self.rung}) is for the mlp's layers, and the model is {self.model_name}; "
                    "leave the rung out, or train the mlp"
                )
        for what in ("steps", "batch", "save_every", "keep"):
            check_whole(what, getattr(self, what), 1)
        check_whole("seed", self.seed)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")
        if self.clip_norm is not None:
            check_max_norm("clip_norm", self.clip_norm)
        if not isinstance(self.layout, Layout):
            raise TypeError(f"layout is {self.layout!r}; give a Layout, such as Layout(dp=2)")
        check_available(self.layout)
        if self.masks:
            from minidist.scale.memory.training_setup import refuse_cut_rows

            refuse_cut_rows(CONFIGS[self.model_name], self.layout)
        if self.layout.precision != "fp32" and self.dtype != "float32":
            raise ValueError(
                f"precision={self.layout.precision} needs dtype float32, and dtype is {self.dtype}; leave "
                "one of them out"
            )
        if self.batch < self.layout.dp:
            raise ValueError(
                f"a global batch of {self.batch} rows is too small for {self.layout.dp} data-parallel ranks; "
                "give each at least one row, or use fewer ranks"
            )

    @property
    def model_name(self) -> str:
        """The model's name, by default the data's model."""
        return self.model or DEFAULT_MODEL.get(self.data, "")

    @property
    def description(self) -> dict[str, str | int | float | None]:
        """Settings, besides the ranks, that change the losses; equal in all runs that continue each other."""
        names = ("data", "batch", "learning_rate", "optimizer", "rung", "dtype", "seed", "clip_norm")
        described = {name: getattr(self, name) for name in names}
        own = {} if self.loss is None else {"loss": self.loss}
        plain = {"momentum": 0.0} if self.optimizer == "sgd" else {}  # tells it from what "sgd" was before
        return {"model": self.model_name, "precision": self.layout.precision, **described, **plain, **own}

    @property
    def masks(self) -> bool:
        """Whether the model is a BERT, which learns to guess masked bytes."""
        return isinstance(CONFIGS.get(self.model_name), BERTConfig)

    def converted(self, inputs: Tensor) -> Tensor:
        """Inputs in the training's dtype; bytes stay integers."""
        return inputs.to(DTYPES[self.dtype]) if inputs.is_floating_point() else inputs


def config_of(model: str, layout: Layout, data: str | None = None, **fields: Any) -> TrainConfig:
    """The description for "mlp", which learns digits, a GPT of bytes ("gpt" is the smallest), or your own."""
    if is_own(model):
        return TrainConfig(require_data(model, data), model, layout, **fields)
    name = DEFAULT_MODEL["bytes"] if model == "gpt" else model
    return TrainConfig("digits" if model == "mlp" else "bytes", name, layout, **fields)


def build(config: TrainConfig) -> tuple[nn.Module, Dataset]:
    """Build the model, on this rank's device, and the data."""
    if is_own(config.model):
        return _own(config)
    dtype, device = DTYPES[config.dtype], comm.device()
    if config.masks:
        shape = shape_of(config.model_name, vocabulary=257, context=BERT_ROW)  # bytes, and the mask
        found = dataset("bytes", length=BERT_ROW)
        train, test = (masked(rows, 256, config.seed) for rows in (found.train, found.test))
        bert = BERT(shape, seed=config.seed, dtype=dtype, device=device)
        return bert, Dataset(found.name, train, test, found.classes)
    if config.model_name != "mlp":
        shape = shape_of(config.model_name, vocabulary=256)  # of bytes, whatever the name's text was
        assert isinstance(shape, GPTConfig)
        model = GPT(shape, seed=config.seed, dtype=dtype, device=device)
        return model, dataset("bytes", length=shape.context)
    data, linear = dataset("digits"), nn.Linear
    if config.rung is not None:
        from minidist.kernels import rung
        from minidist.model.matmul import Linear

        linear = partial(Linear, rung=rung(config.rung))  # type: ignore[assignment]
        if rung(config.rung).device == "cpu":  # a CUDA rung's products would cross the bus
            device = torch.device("cpu")
    sizes = (data.train.inputs.shape[1], HIDDEN, data.classes)
    return MLP(sizes, seed=config.seed, dtype=dtype, device=device, linear=linear), data


def loss_of(config: TrainConfig) -> Loss:
    """The loss to train with: your own, that of masked tokens for a BERT, or cross entropy."""
    if config.loss is not None:
        return function("--loss", config.loss)
    return masked_cross_entropy if config.masks else cross_entropy


def engine_of(config: TrainConfig, model: nn.Module, data: Dataset, **more: Any) -> Engine:
    """Make the engine; `more` are further arguments of `prepare`."""
    optimizer: Any = partial(OPTIMIZERS[config.optimizer], lr=config.learning_rate)  # type: ignore[call-arg]
    example = config.converted(data.train[:1][0])  # a pipeline runs the model on it once to find its layers
    loss, clip_norm = loss_of(config), config.clip_norm
    return prepare(model, optimizer, config.layout, loss, clip_norm=clip_norm, example=example, **more)


def _own(config: TrainConfig) -> tuple[nn.Module, Dataset]:
    """Build a model of your own. The last tenth of its rows is held out."""
    from minidist.scale.dry_run.own_model import require_module, require_rows

    torch.manual_seed(config.seed)
    model = require_module(config.model_name, function("--model", config.model_name)())
    inputs, targets = require_rows(config.model_name, function("--data", config.data)())
    held_out = max(1, len(inputs) // 10)
    train, test = (Rows(inputs[part], targets[part]) for part in (slice(-held_out), slice(-held_out, None)))
    if config.dtype != "float32":
        model.to(DTYPES[config.dtype])
    classes = 0 if targets.is_floating_point() else int(targets.max()) + 1
    return model.to(comm.device()), Dataset(config.data, train, test, classes)


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
        Stopped: SIGTERM came before the training began, or after its end.
    """
    results: list[TrainResult]
    if config.save is None or started_by() is not None:
        results = launch(train, config.layout.ranks, (config, progress), timeout)
    else:
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
                raise Stopped(
                    f"stopped by SIGTERM; the same command continues with what is saved in {config.save}"
                ) from death
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
        digest.update(value.cpu().reshape(-1).view(torch.uint8).numpy().data)
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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    # Write to the descriptor, since a rank's sys.stderr forwards whole lines to the caller.
    with os.fdopen(os.dup(2), "w", errors="replace") as terminal:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
        )
        name = f"{config.model_name} on {config.data}"
        with Progress(TextColumn(name), *columns, console=Console(file=terminal)) as bar:
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
