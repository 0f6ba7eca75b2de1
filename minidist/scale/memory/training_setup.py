"""How a model is trained: the question that the models of memory and time and the planner answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from minidist._arguments import is_number, is_whole
from minidist._names import unknown
from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.context_parallel import zigzag_order
from minidist.parallel.contract.layout import Layout, check_secondary
from minidist.scale.memory.parameter_sizes import share
from minidist.scale.memory.state_bytes import BYTES, OPTIMIZERS, StateSharing

BatchSize = int | tuple[int, int]
AXES = ("pp", "dp", "cp", "tp")
"""The mesh's axes, from the outermost to the innermost, in which ranks are numbered."""


@dataclass(frozen=True)
class TrainingSetup:
    """A layout, a batch, a precision and an optimizer: all that a step depends on besides the model."""

    layout: Layout
    rows: int  # of the global batch
    tokens: int = 0  # in each row; 0 for a model of your own
    optimizer: str = "adam"
    secondary: int = 0  # ranks that share a second copy of the parameters, an option of `prepare`
    other_precision: str = ""  # if it is not the layout's

    @property
    def precision(self) -> str:
        """What the model computes in."""
        return self.other_precision or self.layout.precision

    @cached_property
    def sharing(self) -> StateSharing:
        """How data-parallel ranks keep the model's state."""
        layout = self.layout
        return StateSharing(layout.residency, layout.owners, self.precision, self.optimizer, self.secondary)

    @cached_property
    def sets(self) -> tuple[TrainingSetup, ...]:
        """The training as each set of parameters sees it: all others, and experts where ranks share them.

        To those with the same experts, the ep neighbours of a rank are like those of tensor parallelism.
        """
        layout = self.layout
        if layout.ep == 1:
            return (self,)
        ranks = layout.dp * layout.cp // layout.ep
        fewer = replace(layout, dp=ranks, cp=1, cp_kind="ring", tp=layout.tp * layout.ep, ep=1)
        return self, replace(self, layout=fewer, rows=ranks * self.own_rows(), secondary=0)

    def own_rows(self, data_rank: int = 0) -> int:
        """How many rows a data-parallel rank has; rank 0 has the most."""
        return share(self.rows, self.layout.dp, data_rank)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches have rows, on the rank with the most rows."""
        return min(self.layout.micro_batches, self.own_rows())

    @property
    def micro_rows(self) -> dict[int, int]:
        """How many of these micro-batches have so many rows; the first ones have the most."""
        count = self.micro_batches
        rows, longer = divmod(self.own_rows(), count)
        return {rows + 1: longer, rows: count - longer} if longer else {rows: count}

    @property
    def context_rank(self) -> int:
        """The context-parallel rank with the most tokens."""
        return _with_most_tokens(self.tokens, self.layout.cp)

    def own_tokens(self, context_rank: int) -> int:
        """How many tokens of each row a context-parallel rank has."""
        return zigzag_order.size(self.tokens, self.layout.cp, context_rank)


@lru_cache(maxsize=1024)
def _with_most_tokens(tokens: int, ranks: int) -> int:
    return max(range(ranks), key=partial(zigzag_order.size, tokens, ranks))


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """A rank's coordinate along each axis of the mesh, from the outermost axis to the innermost."""
    found = {}
    for axis in reversed(AXES):
        size = getattr(layout, axis)
        found[axis], rank = rank % size, rank // size
    return {axis: found[axis] for axis in AXES}


# Checks of what the caller asks for.


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


def rows_and_tokens(shape: TransformerConfig, batch: BatchSize, least: int) -> tuple[int, int]:
    """The rows of a batch, at least so many, and the tokens in each row, by default the model's context."""
    rows, tokens = batch if isinstance(batch, tuple) else (batch, shape.context)
    if rows < least or not 1 <= tokens <= shape.context:
        raise ValueError(
            f"batch is {rows} rows of {tokens} tokens; give rows, at least {least}, of 1 to "
            f"{shape.context} tokens"
        )
    return rows, tokens


def check_types(layout: object, batch: object, rank: object) -> None:
    """TypeError if an argument has the wrong type."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as Layout(dp=2), or None for one rank")
    pair = isinstance(batch, tuple) and len(batch) == 2 and all(map(is_whole, batch))
    if not (pair or is_whole(batch)):
        raise TypeError(
            f"batch is {batch!r}; give whole numbers: rows, such as 8, or rows and tokens, such as (8, 128)"
        )
    if rank is not None and not is_whole(rank):
        raise TypeError(f"rank is {rank!r}; give a whole number, or None for the rank with the most bytes")


def check_sharing(setup: TrainingSetup) -> None:
    """ValueError if the precision or the optimizer is unknown, or `prepare` refuses the second copy."""
    for what, value, known in (
        ("precision", setup.precision, BYTES),
        ("optimizer", setup.optimizer, OPTIMIZERS),
    ):
        if value not in known:
            raise unknown(what, value, known)
    if setup.secondary != 0:
        check_secondary(setup.layout, setup.secondary)


def check_divisible(config: object, layout: Layout) -> None:
    """TypeError or ValueError unless the layout can divide the model: a shape, or a number of parameters."""
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
        if layout.trading > max(config.heads // layout.tp, 1):
            raise ValueError(
                f"{layout.trading} ranks trade tokens for heads with cp_kind={layout.cp_kind!r}, and have "
                f'{config.heads // layout.tp} heads; give cp_kind="ring", or let fewer trade'
            )
        if layout.ep > 1 and not config.experts:
            raise ValueError(
                f"ep is {layout.ep} in the layout, and the model has no experts for ranks to share; leave ep "
                "out, or take a model with experts, such as GPTConfig(experts=8)"
            )
        if layout.ep > 1 and config.experts % layout.ep:
            raise ValueError(
                f"ep is {layout.ep} in the layout and the model has {config.experts} experts in a block; "
                "give a divisor of their number, or leave it out"
            )
    elif not is_number(config):
        raise TypeError(f"config is {config!r}; give a GPTConfig, a BERTConfig, a name, or a number")
    elif not 0 <= config < math.inf or layout.tp * layout.pp * layout.cp > 1:
        raise ValueError(
            f"config is {config} parameters and the layout {layout}; give 0 or more, and for tp, pp and "
            "cp a model's shape"
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
