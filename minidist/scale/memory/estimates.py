"""Memory of training on each rank, computed from a model's shape and a layout without building anything.

state_bytes.py counts parameters, gradients and optimizer state; saved_activations.py counts activations. Both
follow the papers and add what minidist holds beyond their formulas, so that `engine.memory()` agrees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.contract.recompute_policies import recomputed_parts
from minidist.parallel.pipeline.schedules import Schedule, by_name
from minidist.scale.memory.parameter_sizes import ModelPart, own_parts, share
from minidist.scale.memory.saved_activations import ATTENTIONS, Saved
from minidist.scale.memory.state_bytes import States, by_formula, held
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
    if rank is not None:
        return _on_rank(shape, setup, attention, coordinates(layout, rank))
    # Ranks of one stage differ by at most a row, some tokens and a slice of the matrices.
    fullest = {"dp": 0, "cp": max(range(layout.cp), key=setup.own_tokens), "tp": layout.tp - 1}
    ranks = ({"pp": stage, **fullest} for stage in range(layout.pp))
    return max((_on_rank(shape, setup, attention, each) for each in ranks), key=lambda found: found.peak)


def _on_rank(
    shape: TransformerConfig, setup: TrainingSetup, attention: str | None, place: dict[str, int]
) -> Estimate:
    """Estimate for the rank at this place in the mesh."""
    layout = setup.layout
    stage = place["tp"], place["pp"]
    part = ModelPart(layout.tp, layout.pp, layout.chunks, *stage, layout.schedule, layout.ep)
    states = held(shape, part, tuple(each.sharing for each in setup.sets))
    rows, tokens = setup.own_rows(place["dp"]), setup.own_tokens(place["cp"])
    blocks = sum(0 < i <= shape.layers for layers in own_parts(shape, part) for i in layers)
    buffers = blocks * shape.experts * max(setup.sharing.element, 4)  # the routers' biases
    if not rows:
        return Estimate.of(states, buffers=buffers)
    options = setup.sharing.element, attention, part, layout.sequence_parallel, layout.cp > 1
    whole, count = Saved(shape, rows, tokens, *options), min(layout.micro_batches, rows)
    return Estimate.of(states, *activations(whole, count, layout.recompute), buffers=buffers)


@lru_cache(maxsize=16384)
def activations(whole: Saved, count: int, recompute: bool | str) -> tuple[int, int]:
    """Peak bytes that `count` micro-batches of the `whole` rows save on a stage, and the transient logits.

    The result does not depend on ZeRO's stage, so a planner asks for each four times.
    """
    part = whole.part
    longer = whole.rows % count  # so many micro-batches, the first ones, have an additional row
    saved = [replace(whole, rows=share(whole.rows, count, each)) for each in sorted({0, longer})]
    chunks = own_parts(whole.config, part)
    last = whole.config.layers + 1
    logits = saved[0].transient_logits if any(last in chunk for chunk in chunks) else 0
    kept = [_kept(each, layers, recompute) for each in saved for layers in chunks]
    if part.pp == 1:  # each backward pass follows its forward pass
        return max(map(max, kept)), logits
    peak = 0
    for live, computing in _moments(part.schedule, part.pp, count, part.chunks, longer)[part.stage]:
        waiting = sum(number * each for number, (each, _) in zip(live, kept, strict=False))
        between, at_most = kept[computing]
        peak = max(peak, waiting, waiting - between + at_most)
    return peak, logits


@lru_cache(maxsize=1024)
def _moments(name: str, ranks: int, micro_batches: int, chunks: int, longer: int) -> list[set[Moment]]:
    """For each stage of a schedule the distinct moments at which it computes."""
    found: list[set[Moment]] = []
    for own in schedule_of(name, ranks, micro_batches, chunks):
        live = [0] * 2 * chunks
        found.append(set())
        for each in own:
            if not each.computes:
                continue
            kind = each.chunk + (chunks if 0 < longer <= each.micro_batch else 0)
            live[kind] += each.kind == "forward"
            found[-1].add((tuple(live), kind))
            live[kind] -= each.kind in ("backward", "backward_weight")
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
        known[key] = known.get(key) or saved.layer(i, again[i])
        kept, most = known[key]
        between, peak = between + kept, max(peak, between + most)
    if count + 1 in layers:
        between += saved.loss()
    return between, max(between, peak)
