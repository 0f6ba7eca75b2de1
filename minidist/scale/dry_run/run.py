"""A dry run: the code of a training, run as one rank of a layout of any size, with nobody else and no data.

>>> found = dryrun("gpt2-xl", Layout(dp=64, tp=4, pp=4, zero=1))
>>> found.bytes_sent, found.memory

The engine is prepared and makes two steps. Tensors hold no data (fake_tensors.py), the other ranks are not
there (fake_world.py), and the ledgers count each call with its axis and phase (calls.py). What a step
sends is therefore exact, and memory what `engine.memory()` says on that rank; nothing of it is a formula.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.engine.prepare import prepare
from minidist.parallel.engine.training_step import HybridEngine
from minidist.parallel.training.precision import DTYPES
from minidist.scale.dry_run.arguments import check, check_options, kinds, split_rank
from minidist.scale.dry_run.calls import CallSummary, DryCall, axis_names, lines, phases_of, recorded
from minidist.scale.dry_run.fake_tensors import DryTensors, NoData
from minidist.scale.dry_run.fake_world import dry_world
from minidist.scale.dry_run.models import build, loss_of, plan_of
from minidist.scale.dry_run.peers import LayoutPeers

if TYPE_CHECKING:
    from minidist.scale.time.rates import Hardware
    from minidist.scale.time.step_time import StepTime

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
}


@dataclass(frozen=True)
class DryRun:
    """What one rank of a layout would send and hold."""

    model: str  # its name, or its shape
    config: TransformerConfig
    layout: Layout
    batch: tuple[int, int]  # rows of the global batch, tokens in a row
    rank: int
    place: dict[str, int]  # along each axis
    parameters: int  # elements on this rank, as it computes with them; of a whole model where zero is 3
    memory: Memory  # bytes on this rank after a step
    optimizer: str  # as `predict_step` names it: "adam", "momentum" or "sgd"; empty for one of your own
    calls: tuple[DryCall, ...] = field(repr=False)  # of a step, but the first
    # Of the first, in which ranks agree on buckets, forms and orders.
    first_step: tuple[DryCall, ...] = field(repr=False)
    prepare: tuple[DryCall, ...] = field(repr=False)  # before it: the model is sent to all
    seconds: float  # that this dry run took
    options: tuple[str, ...] = ()  # of data_parallel and fully_shard, as they were given

    @property
    def bytes_sent(self) -> int:
        """Bytes that the other ranks get from this one in a step."""
        return sum(call.bytes_sent for call in self.calls)

    @property
    def by_axis(self) -> dict[str, int]:
        """Bytes sent in a step along each axis that there is."""
        return self._sums(lambda call: call.axis)

    @property
    def by_phase(self) -> dict[str, int]:
        """Bytes sent in each phase of a step."""
        return self._sums(lambda call: call.phase)

    @property
    def lines(self) -> list[CallSummary]:
        """A step's calls, those of one axis, phase, name and dtype together."""
        return lines(self.calls)

    def predict(self, hardware: str | Hardware = "h100") -> StepTime:
        """The time of a step on a machine, with what that assumes; see `predict_step`.

        It knows no options of `prepare`: where some were given, the assumptions say that they are left out.
        """
        from minidist.scale.time.step_time import predict_step

        if not self.optimizer:
            raise ValueError(
                "the optimizer is a function of your own, whose update has no known time; give 'adamw', "
                "'adam', 'momentum' or 'sgd'"
            )
        found = predict_step(self.config, self.layout, self.batch, hardware, optimizer=self.optimizer)
        if not self.options:
            return found
        left_out = f"the time is that without {' and '.join(self.options)}, which change what is sent or when"
        return replace(found, assumptions=[*found.assumptions, left_out])

    def _sums(self, key: Callable[[DryCall], str]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for call in self.calls:
            if call.axis:
                found[key(call)] += call.bytes_sent
        return dict(found)


def dryrun(
    model: str | TransformerConfig,
    layout: Layout,
    batch: int | tuple[int, int] | None = None,
    rank: int = 0,
    optimizer: str | MakeOptimizer = "adamw",
    *,
    clip_norm: float | None = None,
    data_parallel: Mapping[str, Any] | None = None,
    fully_shard: Mapping[str, Any] | None = None,
    way: str = "torch",
) -> DryRun:
    """Run a rank of a layout dry: two steps of the engine that `prepare` makes.

    Args:
        model: a shape, or the name of one.
        layout: of all ranks.
        batch: rows of the global batch and tokens in each; rows alone have the model's context; None for a
            row a micro-batch on each data-parallel rank.
        rank: which of them; ranks lie as in `comm.mesh`.
        optimizer: "adamw", "adam", "momentum" (SGD with it), "sgd", or a function from parameters to one.
        clip_norm, data_parallel, fully_shard: see `prepare`.
        way: how ranks talk: "torch", as over a network and between GPUs, or "shared_memory", as those of one
            host without GPUs; it decides who sends in a broadcast.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an unknown name, a number out of range, or a layout or an option that cannot be run dry;
            or this process is in a world already.
    """
    shape = config_of(model) if isinstance(model, str) else model
    rows, tokens = check(shape, layout, batch, rank, way)
    check_options(data_parallel, fully_shard)
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    named = optimizer.removesuffix("w") if isinstance(optimizer, str) else ""
    began = time.perf_counter()
    place = split_rank(layout, rank)
    own_rows = len(range(place["dp"], rows, layout.dp))
    own_tokens = zigzag_order.size(tokens, layout.cp, place["cp"]) if layout.cp > 1 else tokens
    outside = own_tokens // layout.tp if layout.sequence_parallel else own_tokens
    dtype = DTYPES.get(layout.precision, torch.float32)
    peers = LayoutPeers(layout, place["pp"], (outside, shape.width), dtype)
    tensors = DryTensors()
    try:
        with tensors, dry_world(rank, layout.ranks, tensors, peers, way):
            with recorded("prepare") as prepared:
                engine = prepare(
                    build(shape, tensors),
                    make,
                    layout,
                    loss_of(shape),
                    data_parallel,
                    clip_norm,
                    fully_shard=fully_shard,
                    plan=plan_of(shape, layout.tp),
                )
            assert isinstance(engine, HybridEngine)
            names = axis_names(engine.mesh)
            for call in prepared:
                call.axis = names(call) if len(call.group) > 1 else ""
            first, calls = (_step(engine, tensors, peers, (own_rows, tokens), names) for _ in range(2))
            memory = engine.memory()
            parameters = sum(p.numel() for p in engine.model.parameters())
            del engine
    except NoData as error:
        raise ValueError(str(error)) from error
    return DryRun(
        model if isinstance(model, str) else f"{shape.layers} layers of {shape.width}",
        shape,
        layout,
        (rows, tokens),
        rank,
        place,
        parameters,
        memory,
        named,
        calls,
        first,
        tuple(prepared),
        time.perf_counter() - began,
        tuple(
            f"{name}={value!r}"
            for options in (data_parallel, fully_shard)
            for name, value in (options or {}).items()
            if name != "initialize"  # which no step comes to
        ),
    )


def dryrun_kinds(
    model: str | TransformerConfig,
    layout: Layout,
    batch: int | tuple[int, int] | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    *,
    done: Callable[[int, int], object] = lambda done, of: None,
    **options: Any,
) -> list[tuple[DryRun, int]]:
    """One rank of each kind: stages of a pipeline differ, and ranks whose shares are of other sizes.

    Args:
        model, layout, batch, optimizer, options: see `dryrun`.
        done: called after each with how many are done, and of how many.

    Returns:
        The dry runs by rank, each with the number of ranks that are like it; together all of the layout's.
    """
    shape = config_of(model) if isinstance(model, str) else model
    found: list[tuple[DryRun, int]] = []
    each = kinds(shape, layout, check(shape, layout, batch, 0, options.get("way", "torch")))
    for rank, count in each:
        found.append((dryrun(model, layout, batch, rank, optimizer, **options), count))
        done(len(found), len(each))
    return found


def _step(
    engine: HybridEngine,
    tensors: DryTensors,
    peers: LayoutPeers,
    batch: tuple[int, int],
    names: Any,
) -> tuple[DryCall, ...]:
    """The calls of one step."""
    peers.begin(batch[0])
    inputs, targets = (tensors.empty(batch, torch.int64) for _ in range(2))
    with recorded("forward", names) as calls, phases_of(engine, calls):
        engine.step(inputs, targets)
    return tuple(calls)
