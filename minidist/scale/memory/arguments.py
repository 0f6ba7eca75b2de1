"""Checks of the arguments of `estimate`, which the planner and the dry run share."""

from __future__ import annotations

import math

from minidist._arguments import is_number, is_whole
from minidist._names import unknown
from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.contract.layout import Layout
from minidist.scale.memory.saved_activations import ATTENTIONS
from minidist.scale.memory.state_bytes import BYTES, OPTIMIZERS


def named_shape(model: object) -> tuple[TransformerConfig, str]:
    """A model's shape and name; TypeError if `model` is neither a shape nor the name of one."""
    if isinstance(model, str):
        return config_of(model), model
    if not isinstance(model, TransformerConfig):
        given = repr(model) if isinstance(model, int | float | None) else f"of type {type(model).__name__}"
        raise TypeError(
            f"model is {given}; give a GPTConfig, a BERTConfig, or a name such as 'gpt2-small': the models "
            "of memory and time know transformers, by their shape"
        )
    return model, f"{model.layers} layers of {model.width}"


def rows_and_tokens(shape: TransformerConfig, batch: int | tuple[int, int], least: int) -> tuple[int, int]:
    """The rows of a batch, at least so many, and the tokens in each row, by default the model's context."""
    rows, tokens = batch if isinstance(batch, tuple) else (batch, shape.context)
    if rows < least or not 1 <= tokens <= shape.context:
        raise ValueError(
            f"batch is {rows} rows of {tokens} tokens; give rows, at least {least}, of 1 to "
            f"{shape.context} tokens"
        )
    return rows, tokens


def check_types(layout: object, batch: object, rank: object) -> None:
    """TypeError if one of them is no layout, no batch or no rank."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as Layout(dp=2), or None for one rank")
    pair = isinstance(batch, tuple) and len(batch) == 2 and all(map(is_whole, batch))
    if not (pair or is_whole(batch)):
        raise TypeError(
            f"batch is {batch!r}; give whole numbers: rows, such as 8, or rows and tokens, such as (8, 128)"
        )
    if rank is not None and not is_whole(rank):
        raise TypeError(f"rank is {rank!r}; give a whole number, or None for the rank with the most bytes")


def check_secondary(layout: Layout, secondary: object) -> None:
    """ValueError unless `secondary` is 0 or a number of ranks that `prepare` takes with the layout."""
    ranks = layout.owners
    if secondary == 0:
        return
    if layout.zero != 3 or not is_whole(secondary) or not 1 < secondary < ranks or ranks % secondary:
        raise ValueError(
            f"secondary is {secondary!r} and the layout {layout}; give, with zero=3, a divisor of the "
            f"{ranks} ranks that share the parameters, from 2 on and smaller than that; or 0 for no second "
            "copy"
        )


def refuse_cut_rows(shape: TransformerConfig, layout: Layout) -> None:
    """ValueError if the layout divides the tokens of a BERT, which `prepare` does not support.

    With cp the engine runs causal ring attention, and a BERT's attention is not causal. sequence_parallel
    needs a plan that says whose gradients are summed, and there is none for a BERT.
    """
    if not isinstance(shape, GPTConfig) and (layout.cp > 1 or layout.sequence_parallel):
        axis = "cp" if layout.cp > 1 else "sequence_parallel"
        raise ValueError(
            f"the layout has {axis}, which divides the tokens, and this is a BERT; leave it out, or use a GPT"
        )


def check(
    config: object,
    layout: Layout,
    precision: str,
    optimizer: str,
    attention: str | None = None,
    rank: int | None = None,
) -> None:
    """TypeError or ValueError if a value is unknown or out of range, or the model cannot be divided so."""
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
    elif not is_number(config):
        raise TypeError(f"config is {config!r}; give a GPTConfig, a BERTConfig, a name, or a number")
    elif not 0 <= config < math.inf or layout.tp * layout.pp * layout.cp > 1:
        raise ValueError(
            f"config is {config} parameters and the layout {layout}; give 0 or more, and for tp, pp and "
            "cp a model's shape"
        )
