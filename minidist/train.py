"""Training from a description: what `minidist train` runs, and a model of a loop of one's own.

>>> from minidist.train import TrainConfig, train
>>> md.launch(train, ranks=2, args=(TrainConfig(layout=md.Layout(dp=2)),))
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

import torch
from torch import Tensor, nn

from minidist import comm
from minidist._names import unknown
from minidist.checkpoint import checkpoints
from minidist.comm.cluster import Cluster
from minidist.comm.errors import RankDied
from minidist.comm.launch import launch
from minidist.model import CONFIGS, GPT, MLP, Dataset, GPTConfig, Rows, Sampler, accuracy, config, dataset
from minidist.parallel.clipping import check_max_norm
from minidist.parallel.engine import Engine
from minidist.parallel.layout import Layout
from minidist.parallel.prepare import check_available, prepare
from minidist.resuming import Resuming, reserved
from minidist.stopping import Stopped, give_up, termination

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEFAULT_MODEL = {"digits": "mlp", "bytes": "byte-tiny"}
MODELS = ("mlp", *(name for name, shape in CONFIGS.items() if isinstance(shape, GPTConfig)))
HIDDEN = 128
"""Width of the MLP's hidden layer."""
TEST_ROWS = 512
"""Held-out rows that an evaluation takes at most: the digits have fewer, the corpus many more."""


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and how.

    Raises:
        ValueError: an unknown name, with the nearest known one; a number out of range; a model that does not
            fit the data.
    """

    data: str = "digits"  # or "bytes"
    model: str | None = None  # "mlp" for digits; a GPT's name for bytes; None for the data's default
    layout: Layout = field(default_factory=Layout)
    steps: int = 230  # global batches; on the digits, 230 of 64 rows are ten epochs
    batch: int = 64  # rows of a global batch, over all data-parallel ranks
    learning_rate: float = 3e-3
    optimizer: str = "adamw"
    rung: str | None = None  # the matmul rung that the MLP's layers run on; None for torch's product
    dtype: str = "float32"
    seed: int = 0  # of the weights and of the order of rows
    clip_norm: float | None = None  # the largest norm that gradients may have; None for any
    save: str | None = None  # a folder for checkpoints, from which a run that was stopped goes on
    save_every: int = 50  # steps from one checkpoint to the next; the end is one, too
    keep: int = 3  # checkpoints that stay, the newest
    resume: bool = True  # go on from the folder's newest whole checkpoint; False refuses a folder with some

    def __post_init__(self) -> None:
        for what, name, known in (
            ("data set", self.data, DEFAULT_MODEL),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("dtype", self.dtype, DTYPES),
            ("model", self.model_name, MODELS),
        ):
            if name not in known:
                raise unknown(what, name, known)
        if (self.data == "digits") != (self.model_name == "mlp"):
            fitting = "the mlp" if self.data == "digits" else f"a GPT, such as {DEFAULT_MODEL['bytes']}"
            raise ValueError(f"the model {self.model_name} cannot train on {self.data}; that takes {fitting}")
        if self.rung is not None:
            from minidist.kernels import rung

            rung(self.rung)
            if self.model_name != "mlp":
                raise ValueError(
                    f"a rung ({self.rung}) is for the mlp's layers, and the model is {self.model_name}; "
                    "leave the rung out, or train the mlp"
                )
        numbers = ("steps", "batch", "seed", "save_every", "keep")
        for what, value in ((name, getattr(self, name)) for name in numbers):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{what} is {value!r}; give a whole number")
            if value < 1 and what != "seed":
                raise ValueError(f"{what} is {value}; give at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")
        if self.clip_norm is not None:
            check_max_norm("clip_norm", self.clip_norm)
        if not isinstance(self.layout, Layout):
            raise TypeError(f"layout is {self.layout!r}; give a Layout, such as Layout(dp=2)")
        check_available(self.layout)
        if self.layout.precision != "fp32" and self.dtype != "float32":
            raise ValueError(
                f"precision={self.layout.precision} starts from float32, and dtype is {self.dtype}; leave "
                "one of them out"
            )
        if self.batch < self.layout.dp:
            raise ValueError(
                f"a global batch of {self.batch} rows is too small for {self.layout.dp} data-parallel ranks; "
                "give each at least one row, or use fewer ranks"
            )

    @property
    def model_name(self) -> str:
        """The model, or the data's default where none was named."""
        return self.model or DEFAULT_MODEL.get(self.data, "")

    @property
    def description(self) -> dict[str, str | int | float | None]:
        """What the losses depend on beside the ranks: the same in all runs that go on from each other."""
        names = ("data", "batch", "learning_rate", "optimizer", "rung", "dtype", "seed", "clip_norm")
        described = {name: getattr(self, name) for name in names}
        return {"model": self.model_name, "precision": self.layout.precision, **described}


@dataclass(frozen=True)
class TrainResult:
    """How a training went, the same on every rank but for `seconds` and `bytes_sent`."""

    losses: list[float]  # the mean over each global batch, also of the steps before it was resumed
    test_loss: float  # NaN where it was stopped
    test_accuracy: float
    parameters: int
    seconds: float  # for the steps alone, on this rank
    rows_per_second: float
    bytes_sent: int  # by this rank, in the steps of this run
    stopped: bool = False  # whether SIGTERM ended it, with everything saved
    resumed_at: int = 0  # the steps that were saved before, which this run did not do


def run(config: TrainConfig, timeout: float | None = None, progress: bool = True) -> TrainResult:
    """Train on as many fresh local ranks as the layout asks for; under torchrun, on those that it started.

    Args:
        config: what to train.
        timeout: seconds that the whole run may take; None for no limit.
        progress: draw a progress bar where the standard error is a terminal.

    With `config.save`, SIGTERM to this process or to a rank ends the training at the end of a step, saved.

    Raises:
        RankError: a rank failed; the message says which and why.
        Stopped: SIGTERM came before the training began, or after its end.
    """
    results: list[TrainResult]
    if config.save is None or "TORCHELASTIC_RUN_ID" in os.environ:
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
                    f"stopped by SIGTERM; the same command goes on with what is saved in {config.save}"
                ) from death
    return results[0]


def train(config: TrainConfig, progress: bool = False) -> TrainResult:
    """Train on this rank, with the others of the world.

    Raises:
        ValueError: the world does not fit the layout, a batch has fewer rows than there are ranks, or nothing
            can be saved where it is to be, or another run saves there.
        RuntimeError: the ranks read different data, or end with different weights.
    """
    if config.save is None:
        return _train(config, progress, _never)
    with termination() as asked, reserved(os.path.abspath(config.save)):
        return _train(config, progress, asked)


def _train(config: TrainConfig, progress: bool, asked: Callable[[], bool]) -> TrainResult:
    """See `train`. asked: whether this rank was asked to stop."""
    model, data = build(config)
    _require_equal("data set", data.fingerprint(), "install the same Python and scikit-learn on all machines")
    if config.batch > len(data.train):
        raise ValueError(
            f"batch is {config.batch}, and {config.data} has {len(data.train)} rows; give at most that"
        )
    optimizer = partial(OPTIMIZERS[config.optimizer], lr=config.learning_rate)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # the ranks then cut it
    engine = prepare(model, optimizer, config.layout, clip_norm=config.clip_norm)
    sampler = Sampler(
        len(data.train),
        config.batch,
        rank=engine.data_rank,
        ranks=engine.data_ranks,
        seed=config.seed,
        drop_last=True,  # or an epoch could end in a batch too small for the ranks
    )
    resuming, losses, rows, stopped = None, list[float](), 0, False
    if config.save is not None:
        folder = os.path.abspath(config.save)
        resuming = Resuming(engine, sampler, folder, config.save_every, config.keep, config.description)
    with (
        _progress(config, progress and comm.rank() == 0) as advance,
        comm.ledger() as ledger,
    ):
        if resuming is not None:
            losses = resuming.losses(config.resume)
        resumed_at = len(losses)
        started, sent = time.perf_counter(), ledger.bytes_sent
        for step in range(resumed_at, config.steps):
            inputs, targets = data.train[sampler.share(step)]
            losses.append(engine.step(_converted(inputs, config), targets))
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
        test_accuracy=math.nan if stopped else evaluate(engine, data.test, config, accuracy),
        parameters=parameters,
        seconds=seconds,
        rows_per_second=rows / seconds,
        bytes_sent=sent,
        stopped=stopped,
        resumed_at=resumed_at,
    )


def build(config: TrainConfig) -> tuple[nn.Module, Dataset]:
    """The model, on this rank's device, and the data."""
    dtype, device = DTYPES[config.dtype], comm.device() if config.rung is None else torch.device("cpu")
    if config.model_name != "mlp":
        shape = _gpt(config.model_name)
        return (
            GPT(shape, seed=config.seed, dtype=dtype, device=device),
            dataset("bytes", length=shape.context),
        )
    data = dataset("digits")
    sizes = (data.train.inputs.shape[1], HIDDEN, data.classes)
    linear: Callable[[int, int], nn.Module] = nn.Linear
    if config.rung is not None:
        from minidist.kernels import rung
        from minidist.model.matmul import Linear

        linear = partial(Linear, rung=rung(config.rung))
    return MLP(sizes, seed=config.seed, dtype=dtype, device=device, linear=linear), data


def _never() -> bool:
    return False


def evaluate(
    engine: Engine, rows: Rows, config: TrainConfig, metric: Callable[[Tensor, Tensor], Tensor] | None
) -> float:
    """The mean of a metric over the first held-out rows, each data-parallel rank on its share."""
    count = min(len(rows), TEST_ROWS)
    total = 0.0
    for start in range(0, count, config.batch):
        batch = range(start, min(start + config.batch, count))
        first, last = (len(batch) * (engine.data_rank + i) // engine.data_ranks for i in (0, 1))
        inputs, targets = rows[slice(start + first, start + last)]
        total += engine.evaluate(_converted(inputs, config), targets, metric) * len(batch)
    return total / count


def _gpt(name: str) -> GPTConfig:
    """A GPT's shape for bytes: a vocabulary of 256, whatever text it is named after."""
    shape = config(name, vocabulary=256)
    assert isinstance(shape, GPTConfig)
    return shape


def _converted(inputs: Tensor, config: TrainConfig) -> Tensor:
    return inputs.to(DTYPES[config.dtype]) if inputs.is_floating_point() else inputs


def _fingerprint(state: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in state:
        digest.update(name.encode())
        digest.update(value.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_equal(what: str, fingerprint: str, remedy: str) -> None:
    """RuntimeError, on every rank, where ranks have different fingerprints: 64 hexadecimal digits."""
    everyones = comm.all_gather(torch.tensor([int(fingerprint[:15], 16)], device=comm.device())).tolist()
    different = [rank for rank, each in enumerate(everyones) if each != everyones[0]]
    if different:
        raise RuntimeError(f"the {what} of rank {different[0]} is not that of rank 0: {remedy}")


@contextmanager
def _progress(config: TrainConfig, wanted: bool) -> Iterator[Callable[[float, int], None]]:
    """What to call with each step's loss; it moves a bar where the process's standard error is a terminal."""
    if not wanted or not os.isatty(2):
        yield lambda loss, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    # The descriptor itself: a rank's sys.stderr sends whole lines to the caller.
    with os.fdopen(os.dup(2), "w") as terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(
            *columns, TextColumn("loss {task.fields[loss]:.4f}"), console=Console(file=terminal)
        ) as bar:
            task = bar.add_task(
                f"{config.model_name} on {config.data}", total=config.steps, loss=float("nan")
            )
            yield lambda loss, done: bar.update(task, completed=done, loss=loss)
