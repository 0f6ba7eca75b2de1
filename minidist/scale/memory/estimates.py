"""Memory of training on each rank, computed from a model's shape and a layout without building anything.

state_bytes.py counts parameters, gradients and optimizer state; saved_activations.py counts activations. Both
follow the papers and add what minidist holds beyond their formulas, so that `engine.memory()` agrees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import le, mul

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.contract.recompute_policies import recomputed_parts
from minidist.parallel.contract.schedule_kinds import schedule_kind
from minidist.parallel.schedules.instructions import Schedule
from minidist.parallel.schedules.whole_schedules import by_name
from minidist.scale.memory.parameter_sizes import ModelPart, alike, own_parts, parts, share
from minidist.scale.memory.saved_activations import ATTENTIONS, Saved
from minidist.scale.memory.state_bytes import States, by_formula, stage_states
from minidist.scale.memory.training_setup import (
    BatchSize,
    TrainingSetup,
    check_divisible,
    check_sharing,
    check_types,
    coordinates,
    rows_and_tokens,
)

ModelShape = TransformerConfig | str | int | float
Moment = tuple[tuple[int, ...], int]
"""How many micro-batches of each kind are live on a stage, and which kind computes. A kind is a chunk of the
model and whether the micro-batch has an additional row; those with the row come first."""
WINDOW = 3
"""A pipeline is full, and has no fuller moment later, after this number of micro-batches for each rank."""


@dataclass(frozen=True)
class Estimate(Memory):
    """Predicted bytes on one rank."""

    # Temporary bytes that belong to no part, at the fullest moment of a step: the gradient of the logits and
    # the gathered units in the backward pass; or what the optimizer needs while it steps, less the
    # activations, which are gone by then. The larger of the two.
    transient: int = 0

    @property
    def peak(self) -> int:
        """All parts and the transient bytes: an upper bound, since parts peak at different times."""
        return self.total + self.transient

    @classmethod
    def of(
        cls, states: States, activations: int = 0, logits: int = 0, frozen: int = 0, buffers: int = 0
    ) -> Estimate:
        """The estimate for a rank's states, its activations, and the gradients of its logits."""
        transient = max(logits + states.gathered, states.update - activations)
        parameters = states.parameters + frozen
        return cls(parameters, states.gradients, states.optimizer, activations, buffers, transient)


def estimate(
    config: ModelShape,
    layout: Layout | None = None,
    precision: str | None = None,
    batch: BatchSize = 0,
    *,
    optimizer: str = "adam",
    attention: str | None = None,
    rank: int | None = None,
    secondary: int = 0,
) -> Estimate:
    """Estimate the bytes that `engine.memory()` would count on a rank after a step.

    >>> estimate("gpt2-small", Layout(dp=4, zero=2), "bf16", batch=(32, 1024))
    >>> estimate(7.5e9, Layout(dp=64, zero=3), "bf16").total / 1e9  # 1.875

    tp, pp and cp divide the model as the engine does. A pipeline stage holds the activations of as many
    micro-batches as its schedule keeps live at a time. Ranks are numbered as in `comm.mesh`.

    Args:
        config: a GPTConfig or BERTConfig, the name of one, or a number of parameters. A number gives the
            paper's formulas alone: no activations, no tp, pp and cp.
        layout: None for one rank.
        precision: "fp32", "bf16", "fp16" or "fp64"; None for the layout's.
        batch: rows of the global batch, or (rows, tokens in each row); by default rows have the model's
            context. 0 for no activations.
        optimizer: "adam", "muon", "momentum" (SGD with momentum) or "sgd".
        attention: "fused", "math", or None for torch's choice on CPUs; see `Saved`.
        rank: None for the rank with the most bytes.
        secondary: with zero=3, the ranks that share a second copy of the parameters, as in `prepare`'s
            `fully_shard={"secondary": 8}`; 0 for no second copy.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, unknown or out of range.
    """
    check_types(layout, batch, rank)
    shape = config_of(config) if isinstance(config, str) else config
    rows, tokens = batch if isinstance(batch, tuple) else (batch, getattr(shape, "context", 0))
    setup = TrainingSetup(layout or Layout(), rows, tokens, optimizer, secondary, precision or "")
    return estimate_setup(shape, setup, attention, rank)


def estimate_setup(
    shape: TransformerConfig | int | float,
    setup: TrainingSetup,
    attention: str | None = None,
    rank: int | None = None,
) -> Estimate:
    """Do what `estimate` does, which documents the arguments and the errors."""
    layout = setup.layout
    if attention not in (None, *ATTENTIONS):
        raise unknown("attention", attention, ATTENTIONS)
    if rank is not None and not 0 <= rank < layout.ranks:
        raise ValueError(f"rank is {rank}; give 0 to {layout.ranks - 1}, a rank of the layout, or None")
    check_divisible(shape, layout)
    check_sharing(setup)
    if not isinstance(shape, TransformerConfig):
        return Estimate.of(by_formula(round(shape), setup.sharing))
    rows_and_tokens(shape, (setup.rows, setup.tokens), 0)
    # Ranks of one stage differ by at most a row, some tokens and a slice of the matrices.
    fullest = {"dp": 0, "cp": setup.context_rank, "tp": layout.tp - 1}
    place = fullest if rank is None else coordinates(layout, rank)
    part = ModelPart(layout.tp, layout.pp, layout.chunks, place["tp"], 0, layout.schedule, layout.ep)
    states = stage_states(shape, part, tuple(each.sharing for each in setup.sets))
    rows, tokens = setup.own_rows(place["dp"]), setup.own_tokens(place["cp"])
    options = setup.sharing.element, attention, part, layout.sequence_parallel, layout.cp > 1
    whole, count = Saved(shape, rows, tokens, *options), min(layout.micro_batches, rows)
    saved = activations(whole, count, layout.recompute) if rows else [(0, 0)] * layout.pp

    buffers = [0] * layout.pp  # the biases of the routers
    if shape.experts:
        for stage in range(layout.pp):
            numbers = [i for layers in own_parts(shape, replace(part, stage=stage)) for i in layers]
            blocks = sum(0 < i <= shape.layers for i in numbers)
            buffers[stage] = blocks * shape.experts * max(setup.sharing.element, 4)
    peaks = [
        own.held + max(between + logits + own.gathered, own.update) + more
        for own, (between, logits), more in zip(states, saved, buffers, strict=True)
    ]
    stage = peaks.index(max(peaks)) if rank is None else place["pp"]
    return Estimate.of(states[stage], *saved[stage], buffers=buffers[stage])


@lru_cache(maxsize=16384)
def activations(whole: Saved, count: int, recompute: bool | str) -> list[tuple[int, int]]:
    """For each stage the peak bytes that `count` micro-batches of the `whole` rows save, and its logits.

    The result does not depend on ZeRO's stage, so a planner asks for each four times.
    """
    part = whole.part
    longer = whole.rows % count  # so many micro-batches, the first ones, have an additional row
    saved = [replace(whole, rows=share(whole.rows, count, each)) for each in sorted({0, longer})]
    form = whole.config, part.pp, part.chunks
    layers, like = parts(*form), alike(*form, recompute)
    kinds = [{i: _kept(each, layers[i], recompute) for i in {*like}} for each in saved]
    kept = [[own[i] for i in like] for own in kinds]
    if part.pp == 1:  # each backward pass follows its forward pass
        return [(max(most for ((_, most),) in kept), saved[0].transient_logits)]
    found, moments = [], moments_of(part.schedule, part.pp, count, longer, part.chunks)
    stages = schedule_kind(part.schedule).placement(part.pp, part.chunks).stages
    for own, states in zip(stages, moments, strict=True):
        between, most = zip(*(each[stage] for each in kept for stage in own), strict=True)
        # What the other passes have saved, and the most during the pass that computes.
        peaks = [sum(map(mul, live, between)) + most[now] - between[now] for live, now in states]
        found.append((max(peaks), saved[0].transient_logits if len(layers) - 1 in own else 0))
    return found


@lru_cache(maxsize=4096)
def moments_of(name: str, ranks: int, micro_batches: int, longer: int, chunks: int) -> list[list[Moment]]:
    """For each stage of a schedule the moments at which it computes with the most that is live.

    Most schedules repeat themselves with each group of as many micro-batches as ranks, once the pipeline is
    full. So a few groups have all moments, unless one group more has others.
    """
    window = WINDOW * ranks
    early, late = (max(0, each - window) // ranks * ranks for each in (longer, micro_batches - longer))
    sizes = micro_batches - early - late, longer - early
    if early + late:
        few = _moments(name, ranks, *sizes, chunks)
        if few == _moments(name, ranks, sizes[0] + ranks, sizes[1], chunks):
            return few
    return _moments(name, ranks, micro_batches, longer, chunks)


@lru_cache(maxsize=1024)
def _moments(name: str, ranks: int, micro_batches: int, longer: int, chunks: int) -> list[list[Moment]]:
    found: list[list[Moment]] = []
    for own in schedule_of(name, ranks, micro_batches, chunks):
        live, seen = [0] * 2 * chunks, set[Moment]()
        for each in own:
            if not each.computes:
                continue
            kind = each.chunk + (chunks if 0 < longer <= each.micro_batch else 0)
            live[kind] += each.kind == "forward"
            seen.add((tuple(live), kind))
            live[kind] -= each.kind in ("backward", "backward_weight")
        found.append([])
        fullest: dict[int, list[tuple[int, ...]]] = {}  # by the kind that computes
        for live_then, kind in sorted(seen, reverse=True):
            known = fullest.setdefault(kind, [])
            if not any(all(map(le, live_then, most)) for most in known):
                known.append(live_then)
                found[-1].append((live_then, kind))
    return found


@lru_cache(maxsize=32)
def schedule_of(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """A schedule, kept since it is asked for stage by stage; do not change it."""
    return by_name(name, ranks, micro_batches, chunks)


def _kept(saved: Saved, layers: range, recompute: bool | str) -> tuple[int, int]:
    """Bytes of a micro-batch in a part of the model: between its two passes, and the peak during them."""
    count = saved.config.layers
    again = recomputed_parts(recompute, count)
    known: dict[tuple[bool, bool, frozenset[str]], tuple[int, int]] = {}
    between = peak = 0
    for i in layers:
        key = i == 0, i > count, again[i]  # a large model has many layers, of few kinds
        kept, most = known[key] = known.get(key) or saved.layer(i, again[i])
        between, peak = between + kept, max(peak, between + most)
    if count + 1 in layers:
        between += saved.loss()
    return between, max(between, peak)
