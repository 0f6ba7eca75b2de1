"""A dry run: the training's own code, run as one rank of a layout of any size, without other ranks or data.

>>> found = dryrun("gpt2-xl", Layout(dp=64, tp=4, pp=4, zero=1))
>>> found.bytes_sent, found.memory

It prepares the engine and makes two steps. Tensors hold no data (fake_tensors.py), a process group answers
for the other ranks (fake_world.py), and the ledgers count each call with its axis and phase (calls.py). So
the bytes sent are exact, and the memory is what `engine.memory()` returns on that rank. No formula is used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.layout import Layout, check_available
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.engine.prepare import prepare
from minidist.parallel.training.muon import Muon
from minidist.scale.dryrun.calls import CallSummary, DryCall, axis_names, lines, phases_of, recorded
from minidist.scale.dryrun.fake_tensors import DryTensors, NoData
from minidist.scale.dryrun.fake_world import WAYS, Peers, dry_world, kinds
from minidist.scale.dryrun.own_model import OwnModel
from minidist.scale.dryrun.transformer import Subject, Transformer, subject_of
from minidist.scale.memory.training_setup import BatchSize, TrainingSetup, check_types, coordinates
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.hardware import hardware as hardware_of
from minidist.scale.step_time.prediction import StepTime

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "muon": partial(Muon, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
}
MOST_RANKS = 2**18
"""Numbers that ranks exchange about themselves are computed, so they must stay below `fake_tensors.LARGE`."""


@dataclass(frozen=True)
class DryRun:
    """The messages and the memory of one rank of a layout, by a dry run."""

    model: str  # name, or shape
    config: TransformerConfig | OwnModel
    layout: Layout
    batch: tuple[int, int]  # rows of the global batch, tokens in a row, or 0
    rank: int
    place: dict[str, int]  # the rank's coordinate along each axis
    parameters: int  # elements that this rank computes with; with zero=3, before sharding
    memory: Memory  # bytes on this rank after a step
    optimizer: str  # "adam", "muon", "momentum" or "sgd", as in `predict_step`; empty for your own function
    calls: tuple[DryCall, ...] = field(repr=False)  # of a step after the first
    # Of the first step, in which ranks agree on buckets, shapes and orders.
    first_step: tuple[DryCall, ...] = field(repr=False)
    prepare: tuple[DryCall, ...] = field(repr=False)  # of `prepare`, which sends the model to all ranks
    seconds: float  # the duration of this dry run
    options: tuple[str, ...] = ()  # data_parallel and fully_shard, as given, without "secondary"
    secondary: int = 0  # ranks that share a second copy of the parameters; 0 for no such copy

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(call.bytes_sent for call in self.calls)

    @property
    def by_axis(self) -> dict[str, int]:
        """Bytes sent in a step along each axis."""
        return self._sums(lambda call: call.axis)

    @property
    def by_phase(self) -> dict[str, int]:
        """Bytes sent in each phase of a step."""
        return self._sums(lambda call: call.phase)

    @property
    def lines(self) -> list[CallSummary]:
        """A summary of the calls of a step for each axis, phase, name and dtype."""
        return lines(self.calls)

    @property
    def has_time(self) -> bool:
        """Whether `predict` can predict a step's time: not of emulated FP8 or a part of your own model."""
        return self.layout.precision not in FP8_RECIPES and subject_of(self.config).has_time(self.layout)

    def predict(self, hardware: str | Hardware = "h100") -> StepTime:
        """Predict the time of a step on a machine; see `predict_step`.

        The prediction ignores options of `prepare`; if some were given, the assumptions say so.
        """
        if not self.optimizer:
            raise ValueError(
                "the optimizer is your own function, and the time of its update is unknown; give "
                f"{', '.join(OPTIMIZERS)}"
            )
        setup = TrainingSetup(self.layout, *self.batch, self.optimizer, self.secondary)
        found = subject_of(self.config).predict(setup, hardware_of(hardware))
        if not self.options:
            return found
        left_out = f"the time ignores {' and '.join(self.options)}, which change what is sent or when"
        return replace(found, assumptions=[*found.assumptions, left_out])

    def _sums(self, key: Callable[[DryCall], str]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for call in self.calls:
            if call.axis:
                found[key(call)] += call.bytes_sent
        return dict(found)


def dryrun(
    model: str | TransformerConfig | Subject,
    layout: Layout,
    batch: BatchSize | None = None,
    rank: int = 0,
    optimizer: str | MakeOptimizer = "adamw",
    *,
    clip_norm: float | None = None,
    data_parallel: Mapping[str, Any] | None = None,
    fully_shard: Mapping[str, Any] | None = None,
    way: str = "torch",
) -> DryRun:
    """Run two steps of the training as one rank of a layout, without other ranks or data.

    Args:
        model: a shape, the name of one, or a model of your own.
        layout: of all ranks.
        batch: rows of the global batch, or (rows, tokens in each row), by default the model's context; None
            for one row per micro-batch on each data-parallel rank.
        rank: the rank to run, numbered as in `comm.mesh`.
        optimizer: "adamw", "adam", "muon", "momentum" (SGD with momentum), "sgd", or a function from
            parameters to an optimizer.
        clip_norm, data_parallel, fully_shard: see `prepare`.
        way: how ranks communicate: "torch", as over a network and between GPUs, or "shared_memory", as on one
            host without GPUs. It determines who sends in a broadcast.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a name is unknown, a number is out of range, a layout or an option cannot be run dry, or
            this process has joined a world already.
    """
    subject = subject_of(model)
    rows, tokens = _checked(subject, layout, batch, rank, way)
    _check_options(data_parallel, fully_shard)
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    named = optimizer.removesuffix("w") if isinstance(optimizer, str) else ""
    began = time.perf_counter()
    place = coordinates(layout, rank)
    setup = TrainingSetup(layout, rows, tokens)
    own_rows, own_tokens = setup.own_rows(place["dp"]), setup.own_tokens(place["cp"])
    peers = Peers(layout, place["pp"])
    tensors = DryTensors()
    try:
        with tensors, dry_world(rank, layout.ranks, tensors, peers, way):
            with recorded("prepare") as prepared:
                engine = prepare(
                    subject.build(tensors),
                    make,
                    layout,
                    subject.loss,
                    data_parallel,
                    clip_norm,
                    fully_shard=fully_shard,
                    rehearse=False,
                    example=subject.example(layout),
                )
            rows_here = subject.batch(own_rows, tokens, tensors)
            peers.received = partial(subject.sent_to, engine, own_tokens, tensors)
            secondary = (fully_shard or {}).get("secondary") or 0
            names = axis_names(engine.mesh, layout.owners, secondary or 1, layout.ep)
            for call in prepared:
                call.axis = names(call) if len(call.group) > 1 else ""
            steps = []
            for _ in range(2):
                peers.begin(own_rows)
                with recorded("forward", names) as calls, phases_of(engine, calls):
                    engine.step(*rows_here)
                steps.append(tuple(calls))
            memory = engine.memory()
            parameters = sum(p.numel() for p in engine.model.parameters())
            del engine, peers.received
    except NoData as error:
        raise ValueError(str(error)) from error
    return DryRun(
        subject.name,
        subject.shape if isinstance(subject, Transformer) else subject,
        layout,
        (rows, tokens),
        rank,
        place,
        parameters,
        memory,
        named,
        steps[1],
        steps[0],
        tuple(prepared),
        time.perf_counter() - began,
        tuple(
            f"{option}={value!r}"
            for options in (data_parallel, fully_shard)
            for option, value in (options or {}).items()
            if option not in ("initialize", "secondary")  # no effect on a step; known to `predict`
        ),
        secondary,
    )


def dryrun_kinds(
    model: str | TransformerConfig | Subject,
    layout: Layout,
    batch: BatchSize | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    *,
    done: Callable[[int, int], object] = lambda done, of: None,
    **options: Any,
) -> list[tuple[DryRun, int]]:
    """Run one rank of each kind dry: ranks on different stages, or with shares of different sizes.

    Takes `dryrun`'s arguments, and `done`, which is called after each dry run with the numbers of finished
    ones and of all. Returns the dry runs by rank, each with the number of ranks of its kind.
    """
    subject, found = subject_of(model), list[tuple[DryRun, int]]()
    checked = _checked(subject, layout, batch, 0, options.get("way", "torch"))
    each = kinds(subject.divided, layout, checked)
    for rank, count in each:
        found.append((dryrun(subject, layout, batch, rank, optimizer, **options), count))
        done(len(found), len(each))
    return found


def _checked(
    subject: Subject, layout: Layout, batch: BatchSize | None, rank: int, way: str
) -> tuple[int, int]:
    """Check the arguments of `dryrun`; return the rows and tokens of the global batch."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as Layout(dp=2)")
    if rank is None:
        raise TypeError("rank is None; give one rank, such as 0")
    check_types(layout, 0 if batch is None else batch, rank)
    if layout.ranks > MOST_RANKS:
        raise ValueError(
            f"the layout has {layout.ranks:,} ranks, and a dry run takes {MOST_RANKS:,} at most; give fewer, "
            "such as a smaller dp"
        )
    if way not in WAYS:
        raise unknown("way", way, WAYS)
    check_available(layout)
    rows, tokens = subject.rows_and_tokens(layout.dp * layout.micro_batches if batch is None else batch)
    if rows < layout.dp:
        raise ValueError(
            f"batch is {rows} rows and dp is {layout.dp} in the layout; give each dp rank at least one row"
        )
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank is {rank}; give 0 to {layout.ranks - 1}, a rank of the layout")
    subject.check_dry(layout)
    fewest, residency = rows // layout.dp, layout.residency
    reduces_in_each = residency.whole_parameters and not residency.whole_gradients
    if reduces_in_each and fewest < layout.micro_batches and rows % layout.dp:
        raise ValueError(
            f"batch is {rows} rows, so dp={layout.dp} ranks would have {fewest} or {fewest + 1}, and with "
            f"zero={layout.zero} different numbers of micro-batches; give a multiple of {layout.dp} rows"
        )
    return rows, tokens


def _check_options(data_parallel: object, fully_shard: object) -> None:
    """ValueError if an option of `prepare` needs values or files, which a dry run does not have."""
    options = data_parallel if isinstance(data_parallel, Mapping) else {}
    algorithm, compression = options.get("algorithm", "auto"), compression_of(options.get("compression"))
    if algorithm not in ("auto", *WAYS):
        raise ValueError(
            f"algorithm is {algorithm!r} in data_parallel, and a dry run cannot count its messages; leave "
            "it out"
        )
    if compression is not None and compression.reads_values:
        raise ValueError(
            f"compression is {options['compression']!r} in data_parallel, which depends on values of "
            "gradients, and a dry run computes none; give another, or None"
        )
    offload = fully_shard.get("offload", False) if isinstance(fully_shard, Mapping) else False
    if offload not in (False, "cpu"):
        raise ValueError(
            f"offload is {str(offload)!r} in fully_shard, and a dry run writes no files; give 'cpu', or "
            "leave it out"
        )
