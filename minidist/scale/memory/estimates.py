"""The memory that training takes on each rank, from a model's shape and a layout, before anything is built.

States: see state_bytes.py; activations: see saved_activations.py. Both follow the papers, and count what
minidist holds beyond their formulas, so that `engine.memory()` finds the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.pipeline.schedules import Schedule, by_name
from minidist.scale.memory.arguments import check_types
from minidist.scale.memory.parameter_sizes import ModelPart, parts, share
from minidist.scale.memory.saved_activations import ATTENTIONS, Saved
from minidist.scale.memory.state_bytes import BYTES, OPTIMIZERS, by_formula, held

ModelShape = TransformerConfig | str | int | float
BatchSize = int | tuple[int, int]
Moment = tuple[tuple[int, ...], int]
"""Micro-batches that are live on a stage, those with a row more first, of each chunk; and which of these
kinds computes."""


@dataclass(frozen=True)
class Estimate(Memory):
    """Bytes on one rank, predicted.

    transient: what is there beside the parts at the fullest moment of a step and in none of them: in the
        backward pass the gradient of the logits, and in stage 3 gathered units; or, where that is more, what
        the optimizer takes while it steps, less the activations, which are gone by then.
    """

    transient: int = 0

    @property
    def peak(self) -> int:
        """All parts and the transient bytes: an upper bound, as parts do not all peak at one moment."""
        return self.total + self.transient


def estimate(
    config: ModelShape,
    layout: Layout | None = None,
    precision: str | None = None,
    batch: BatchSize = 0,
    *,
    optimizer: str = "adam",
    attention: str | None = None,
    rank: int | None = None,
) -> Estimate:
    """The bytes that `engine.memory()` counts on a rank after a step, without building the model.

    >>> estimate("gpt2-small", Layout(dp=4, zero=2), "bf16", batch=(32, 1024))
    >>> estimate(7.5e9, Layout(dp=64, zero=3), "bf16").total / 1e9  # 1.875

    tp, pp and cp divide as the engine does: see parameter_sizes.py and saved_activations.py. A stage of a
    pipeline holds the activations of as many micro-batches as its schedule has live at a time. Ranks lie as
    in `comm.mesh`.

    Args:
        config: a GPTConfig or BERTConfig, the name of one, or a number of parameters; the last has no
            activations, and is for the formulas alone, without tp, pp and cp.
        layout: None for one rank.
        precision: "fp32", "bf16", "fp16" or "fp64"; None for the layout's.
        batch: rows of the global batch and tokens in each; rows alone have the model's context; 0 for none.
        optimizer: "adam", "momentum" (SGD with it) or "sgd".
        attention: "fused", "math", or None for what torch does on CPUs: see `Saved`.
        rank: whose bytes; None for the rank with the most.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, unknown or out of range.
    """
    check_types(layout, batch, rank)
    layout = layout or Layout()
    precision = precision or layout.precision
    if isinstance(config, str):
        config = config_of(config)
    check(config, layout, precision, optimizer, attention, rank)
    if isinstance(config, int | float):
        found = by_formula(round(config), layout.dp, layout.zero, precision, optimizer)
        return Estimate(found.parameters, found.gradients, found.optimizer, 0, 0)
    rows, tokens = batch if isinstance(batch, tuple) else (batch, config.context)
    if rows < 0 or not 1 <= tokens <= config.context:
        raise ValueError(
            f"batch is {rows} rows of {tokens} tokens; give rows, none or more, of 1 to {config.context}"
        )
    sizes = layout.pp, layout.dp, layout.cp, layout.tp
    # Ranks of one pipeline stage differ in no more than a row, some tokens and a part of a matrix.
    most = (0, max(range(layout.cp), key=lambda r: zigzag_order.size(tokens, layout.cp, r)), layout.tp - 1)
    chosen = [(stage, *most) for stage in range(layout.pp)] if rank is None else [_place(sizes, rank)]
    return max(
        (_one(config, layout, precision, (rows, tokens), optimizer, attention, *place) for place in chosen),
        key=lambda found: found.peak,
    )


def _place(sizes: tuple[int, ...], rank: int) -> tuple[int, int, int, int]:
    """Of a rank in a grid of these sizes, the last the innermost."""
    place = []
    for size in reversed(sizes):
        place.append(rank % size)
        rank //= size
    tp, cp, dp, pp = place
    return pp, dp, cp, tp


def _one(
    config: TransformerConfig,
    layout: Layout,
    precision: str,
    batch: tuple[int, int],
    optimizer: str,
    attention: str | None,
    stage: int,
    data_rank: int,
    context_rank: int,
    tensor_rank: int,
) -> Estimate:
    """For one rank."""
    place = ModelPart(layout.tp, layout.pp, layout.chunks, tensor_rank, stage)
    states = held(config, layout.dp * layout.cp, layout.zero, precision, optimizer, place)
    rows, tokens = batch[0], zigzag_order.size(batch[1], layout.cp, context_rank)
    own = share(rows, layout.dp, data_rank)
    activations = logits = 0
    if own:
        form = layout.schedule, layout.recompute, layout.sequence_parallel, layout.cp > 1
        activations, logits = _activations(
            config, place, own, min(layout.micro_batches, own), tokens, BYTES[precision], attention, *form
        )
    return Estimate(
        states.parameters,
        states.gradients,
        states.optimizer,
        activations,
        buffers=0,
        transient=max(logits + states.gathered, states.update - activations),
    )


@lru_cache(maxsize=16384)
def _activations(
    config: TransformerConfig,
    place: ModelPart,
    own: int,
    count: int,
    tokens: int,
    element: int,
    attention: str | None,
    schedule: str,
    recompute: bool,
    sequence_parallel: bool,
    ring: bool,
) -> tuple[int, int]:
    """Peak of what `count` micro-batches of `own` rows save on a stage, and the transient logits.

    ZeRO's stage has no part in it, so a planner asks for each four times.
    """
    longer = own % count  # the first of the micro-batches, which have a row more than the others
    saved = [
        Saved(config, share(own, count, part), tokens, element, attention, place, sequence_parallel, ring)
        for part in sorted({0, longer})
    ]
    logits = saved[0].transient_logits if place.stage == place.pp - 1 else 0
    chunks = parts(config, place.pp, place.chunks)[place.stage :: place.pp]
    kept = [_kept(each, layers, recompute) for each in saved for layers in chunks]
    if place.pp == 1:  # each backward pass follows its forward pass
        return max(map(max, kept)), logits
    peak = 0
    for live, computing in _moments(schedule, place.pp, count, place.chunks, longer)[place.stage]:
        waiting = sum(number * each for number, (each, _) in zip(live, kept, strict=False))
        between, at_most = kept[computing]
        peak = max(peak, waiting, waiting - between + at_most)
    return peak, logits


@lru_cache(maxsize=1024)
def _moments(name: str, ranks: int, micro_batches: int, chunks: int, longer: int) -> list[set[Moment]]:
    """For each stage of a schedule what there is while it computes; the same moment comes again and again."""
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
    """A schedule that is asked for stage by stage, and not to be changed."""
    return by_name(name, ranks, micro_batches, chunks)


def _kept(saved: Saved, layers: range, again: bool) -> tuple[int, int]:
    """Bytes of one micro-batch in a part of the model: between its passes; and at the most while they run."""
    count = saved.config.layers
    blocks, first, last = len([i for i in layers if 1 <= i <= count]), 0 in layers, count + 1 in layers
    if not again:
        ends = first * saved.embedding() + last * (saved.head() + saved.loss())
        return (blocks * saved.block() + ends,) * 2
    # Every layer keeps its input, and one at a time the rest.
    inputs = (blocks + last) * saved.stream
    at_the_end = inputs + last * max(saved.loss(), saved.head() - saved.stream)
    in_the_last_block = blocks and blocks * saved.stream + saved.block() - saved.stream
    return inputs, max(at_the_end, in_the_last_block)


def check(
    config: object,
    layout: Layout,
    precision: str,
    optimizer: str,
    attention: str | None,
    rank: int | None,
) -> None:
    """TypeError or ValueError where something is unknown, out of range, or does not go with the rest."""
    for what, value, known in (
        ("precision", precision, BYTES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("attention", attention or "fused", ATTENTIONS),
    ):
        if value not in known:
            raise unknown(what, value, known)
    if rank is not None and not 0 <= rank < layout.ranks:
        raise ValueError(f"rank is {rank}; give 0 to {layout.ranks - 1}, a rank of the layout, or None")
    if isinstance(config, TransformerConfig):
        if config.heads < layout.tp:
            raise ValueError(
                f"tp is {layout.tp} in the layout and heads are {config.heads}; give at most that"
            )
        if config.layers + 2 < layout.pp * layout.chunks:
            raise ValueError(
                f"pp is {layout.pp} with chunks={layout.chunks} in the layout, and {config.layers} blocks "
                "and two ends cannot be cut into as many parts; give fewer"
            )
    elif isinstance(config, int | float) and not isinstance(config, bool):
        if not 0 <= config < math.inf or layout.tp * layout.pp * layout.cp > 1:
            raise ValueError(
                f"config is {config} parameters and the layout {layout}; give 0 or more, and for tp, pp and "
                "cp a model's shape"
            )
    else:
        raise TypeError(f"config is {config!r}; give a GPTConfig, a BERTConfig, a name, or a number")
