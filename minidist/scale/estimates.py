"""The memory that training takes on each rank, from a model's shape and a layout, before anything is built.

States follow the ZeRO paper. With Adam a parameter takes in fp32 4 bytes, its gradient 4, the optimizer 8; in
bf16 and fp16 2 and 2, and the optimizer 12: a copy in float32 and its own 8. Of n data-parallel ranks each
keeps an n-th of the optimizer's part in stage 1, of the gradients too in stage 2, of the parameters too in
stage 3. Activations: see saved.py.

What minidist's strategies hold beyond the formulas is counted too, where there is a model's shape: Adam's
step, 4 bytes for each parameter tensor; the numbers that travel with the gradients; shares that are rounded
up to whole elements.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 3.1 and 5, and figure 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.layout import Layout
from minidist.parallel.memory import Memory
from minidist.scale import tensors
from minidist.scale.saved import ATTENTIONS, Saved
from minidist.scale.tensors import share

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element of the parameters and activations."""
OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
"""Tensors of a parameter's shape in the optimizer's state. AdamW is as Adam."""
Shape = TransformerConfig | str | int | float
Batch = int | tuple[int, int]


@dataclass(frozen=True)
class Estimate(Memory):
    """Bytes on one rank, predicted.

    transient: what lives for a moment beside the rest and is in no part: the logits and the gradient of their
        log-softmax; in stage 2 a bucket's gradients until they are sent; in stage 3 the parameters of a unit
        and of the next, gathered, and a unit's gradients.
    """

    transient: int = 0

    @property
    def peak(self) -> int:
        """All parts and the transient bytes: an upper bound, as they do not peak at the same time."""
        return self.total + self.transient


def estimate(
    config: Shape,
    layout: Layout | None = None,
    precision: str | None = None,
    batch: Batch = 0,
    *,
    optimizer: str = "adam",
    attention: str | None = None,
    rank: int | None = None,
) -> Estimate:
    """The bytes that `engine.memory()` counts on a rank after a step, without building the model.

    >>> estimate("gpt2-small", Layout(dp=4, zero=2), "bf16", batch=(32, 1024))
    >>> estimate(7.5e9, Layout(dp=64, zero=3), "bf16").total / 1e9  # 1.875

    tp and pp divide as the papers say: see tensors.py and saved.py; a pipeline is taken to run 1F1B, where
    stage k of p holds p - k micro-batches. Neighbouring ranks are tp's, then come dp's, then pp's.

    Args:
        config: a GPTConfig or BERTConfig, the name of one, or a number of parameters; the last has no
            activations, and no pipeline or tensor parallelism.
        layout: None for one rank.
        precision: "fp32", "bf16", "fp16" or "fp64"; None for the layout's.
        batch: rows of the global batch and tokens in each; rows alone have the model's context; 0 for none.
        optimizer: "adam", "momentum" (SGD with it) or "sgd".
        attention: "fused", "math", or None for what torch does on CPUs: see `Saved`.
        rank: whose bytes; None for the rank with the most.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, unknown or out of range.
    """
    layout = layout or Layout()
    precision = precision or layout.precision
    _check(config, layout, precision, optimizer, attention, rank)
    if isinstance(config, str):
        config = config_of(config)
    if isinstance(config, int | float):
        return _states([[round(config)]], layout, precision, optimizer, exact=False)
    rows, tokens = batch if isinstance(batch, tuple) else (batch, config.context)
    if rows < 0 or not 1 <= tokens <= config.context:
        raise ValueError(
            f"batch is {rows} rows of {tokens} tokens; give rows, none or more, of 1 to {config.context}"
        )
    places = range(layout.ranks) if rank is None else [rank]
    # Ranks of one pipeline stage differ in no more than a row.
    chosen = {(each // (layout.tp * layout.dp), each // layout.tp % layout.dp) for each in places}
    if rank is None:
        chosen = {(stage, 0) for stage, _ in chosen}
    return max(
        (_one(config, layout, precision, (rows, tokens), optimizer, attention, *place) for place in chosen),
        key=lambda found: found.peak,
    )


def _one(
    config: TransformerConfig,
    layout: Layout,
    precision: str,
    batch: tuple[int, int],
    optimizer: str,
    attention: str | None,
    stage: int,
    data_rank: int,
) -> Estimate:
    """For one stage of the pipeline and one of its data-parallel ranks."""
    states = _states(
        tensors.layers(config, layout.tp, layout.pp, stage), layout, precision, optimizer, exact=True
    )
    rows, tokens = batch
    own = share(rows, layout.dp, data_rank)
    if not own:
        return states
    parts = min(layout.micro_batches, own)
    saved = Saved(config, share(own, parts), tokens, BYTES[precision], attention, layout.tp)
    activations, transient = _activations(saved, layout, stage, parts)
    fields = {**vars(states), "activations": activations, "transient": states.transient + transient}
    return Estimate(**fields)


def _activations(saved: Saved, layout: Layout, stage: int, parts: int) -> tuple[int, int]:
    """Peak of what is saved on a stage, and the logits and their gradients."""
    blocks = share(saved.config.layers, layout.pp, stage)
    first, last = stage == 0, stage == layout.pp - 1
    in_flight = min(layout.pp - stage, parts)
    if layout.recompute:  # every layer keeps its input, and one at a time the rest
        inputs = (blocks + last) * saved.stream
        at_the_end = inputs + last * max(saved.loss(), saved.head() - saved.stream)
        in_the_last_block = blocks and blocks * saved.stream + saved.block() - saved.stream
        kept = (in_flight - 1) * inputs + max(at_the_end, in_the_last_block)
    else:
        ends = first * saved.embedding() + last * (saved.head() + saved.loss())
        kept = in_flight * (blocks * saved.block() + ends)
    return kept, last * saved.logits * (saved.wide + saved.element) // saved.wide


def _states(
    layers: Sequence[tensors.Sizes], layout: Layout, precision: str, optimizer: str, exact: bool
) -> Estimate:
    """The states of a rank with these layers. exact: count also what the paper's formulas leave out."""
    n, zero, element = layout.dp, layout.zero, BYTES[precision]
    elements, count = sum(map(sum, layers)), sum(map(len, layers))
    own = share(elements, n)
    updated = 4 if element == 2 else element  # the precision in which the optimizer works
    masters = updated if element == 2 else 0
    state = (own if zero else elements) * (OPTIMIZERS[optimizer] * updated + masters)
    gradients = (own if zero > 1 else elements) * element
    if exact:
        state += 4 * count * (optimizer == "adam")
        gradients += (count + 2) * max(element, 4) * (n > 1 and not zero)
    transient = 0
    if zero == 3 and exact and n > 1:
        units = sorted(map(sum, layers), reverse=True)
        transient = (sum(units[:2]) + units[0]) * element
    return Estimate(
        parameters=(own if zero > 2 else elements) * element,
        gradients=gradients,
        optimizer=state,
        activations=0,
        buffers=0,
        transient=transient,
    )


def _check(
    config: object,
    layout: Layout,
    precision: str,
    optimizer: str,
    attention: str | None,
    rank: int | None,
) -> None:
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
        if config.heads % layout.tp:
            raise ValueError(
                f"tp is {layout.tp} in the layout and heads are {config.heads}; tp must divide them"
            )
        if config.layers < layout.pp:
            raise ValueError(
                f"pp is {layout.pp} in the layout and layers are {config.layers}; give pp at most that"
            )
    elif isinstance(config, int | float) and not isinstance(config, bool):
        if not config >= 0 or layout.tp * layout.pp > 1:
            raise ValueError(
                f"config is {config} parameters and the layout {layout}; give 0 or more, and for tp and pp a "
                "model's shape"
            )
    elif not isinstance(config, str):
        raise TypeError(f"config is {config!r}; give a GPTConfig, a BERTConfig, a name, or a number")
