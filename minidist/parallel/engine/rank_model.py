"""This rank's part of a step: of the model, of the batches that a caller gives, and of the loss.

Ranks and micro-batches have parts of one global batch, and a step takes the mean of their losses. For that
each loss has to be a mean itself, and to say over how much: over rows, unless it returns (mean, weight), such
as the number of tokens that count. (rehearsal.py compares.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.mesh import Mesh
from minidist.model.loss import cross_entropy
from minidist.parallel.context.sequence_share import SequenceShare
from minidist.parallel.contract.batch import mapped, rows_of, split, tensors, to_device
from minidist.parallel.contract.user_functions import Loss, first_argument
from minidist.parallel.engine.parameter_placement import Placement
from minidist.parallel.tensor.vocabulary import gather_logits, vocab_parallel_cross_entropy

Weight = float | Tensor
"""Over how much a loss is a mean: a number, or a scalar tensor, which no CPU waits for."""
IGNORED = -100
"""The label that transformers, and torch by default, leave out of a loss."""


Pair = tuple[Any, Any]
"""Inputs and targets; the same object twice if the batch is one."""


class _Nothing:
    """Stands for targets that were not given; None would be a mistake."""


NOTHING: Any = _Nothing()


class Tied(NamedTuple):
    """A parameter of which several stages of a pipeline hold a copy."""

    name: str | None  # on this rank; None if it has no copy
    stages: tuple[int, ...]


class RankModel(NamedTuple):
    """This rank's part of a model."""

    model: nn.Module  # the part, with the whole's names
    mesh: Mesh  # of all ranks
    placement: Placement  # where its parameters lie in the whole
    token_share: SequenceShare | None  # which tokens of a row this rank has; None without cp
    stages: tuple[nn.Module, ...]  # the modules of this rank's pipeline chunks; empty without pp
    tied: tuple[Tied, ...]  # parameters whose gradients are summed over stages
    vocabulary: int | None  # its size if outputs are this rank's part of the logits; None if they are whole

    def loss(self, loss: Loss, outputs: Any, targets: Any) -> Any:
        """Call a loss or a metric with this rank's outputs.

        If the ranks share the logits, `cross_entropy` becomes `vocab_parallel_cross_entropy`; for any other
        function the logits are gathered, which sends more.
        """
        if self.vocabulary is None:
            return loss(outputs, targets)
        if loss is cross_entropy:
            group = self.mesh.group("tp")
            return vocab_parallel_cross_entropy(outputs, targets, group, self.vocabulary)
        return loss(self.whole(outputs), targets)

    def whole(self, outputs: Any) -> Any:
        """Outputs with all logits, if the ranks share them: the "logits", or else the first tensor."""
        if self.vocabulary is None:
            return outputs
        named = isinstance(outputs, Mapping) and "logits" in outputs
        logits: Tensor = outputs["logits"] if named else next(x for _, x in tensors(outputs))
        gathered = gather_logits(logits, self.mesh.group("tp"), self.vocabulary)
        return mapped(lambda x: gathered if x is logits else x, outputs)

    def batch(self, pair: Pair, is_padding: bool, device: torch.device) -> RankBatch:
        """A batch on a device, with this rank's tokens."""
        inputs, targets = pair
        x = to_device(inputs, device)
        y = x if targets is inputs else to_device(targets, device)
        rows = rows_of(x)
        x, y, token_fraction = self.own_tokens(x, y)
        return RankBatch(x, y, rows, token_fraction, is_padding)

    def own_tokens(self, inputs: Any, targets: Any) -> tuple[Any, Any, float]:
        """This rank's tokens of its rows, (B, T) each, and which fraction of the tokens they are."""
        share = self.token_share
        if share is None:
            return inputs, targets, 1.0
        found = [*tensors(inputs, "inputs"), *tensors(targets, "targets")]
        if any(x.dim() < 2 or x.shape[:2] != found[0][1].shape[:2] for _, x in found):
            each = " and ".join(f"{name} {tuple(x.shape)}" for name, x in found).replace(" ", " are ", 1)
            raise ValueError(
                f"{each}, and cp={share.ranks} cuts rows of tokens; give (B, T) and a target for each "
                "token, or a layout with cp=1"
            )
        x = mapped(share.cut, inputs)
        return x, x if targets is inputs else mapped(share.cut, targets), share.part


class RankBatch(NamedTuple):
    """This rank's part of a global batch, or a micro-batch of it."""

    inputs: Any
    targets: Any  # the inputs themselves if the batch is one
    rows: int
    token_fraction: float = 1.0  # of the rows' tokens, which context parallelism deals to ranks
    is_padding: bool = False  # computed so that this rank takes part in collectives; counts nothing

    @property
    def weight(self) -> float:
        """Over how much its loss is a mean, if the loss does not say."""
        return 0.0 if self.is_padding else self.rows * self.token_fraction

    def split(self, parts: int) -> list[RankBatch]:
        """So many micro-batches, or one for each row if there are fewer."""
        parts = min(parts, self.rows)
        if parts <= 1:
            return [self]
        inputs = split(self.inputs, parts)
        targets = inputs if self.targets is self.inputs else split(self.targets, parts)
        pairs = zip(inputs, targets, strict=True)
        return [self._replace(inputs=x, targets=y, rows=rows_of(x)) for x, y in pairs]


def pairs_of(inputs: Any, targets: Any, is_one: bool) -> list[Pair]:
    """The batches of a step as (inputs, targets).

    Without targets, a pair is inputs and targets, as loaders give them, and anything else is a batch. A list
    is of batches, unless it has a tensor in it: torch's loaders give batches as lists.

    is_one: whether the loss takes the batch as one, pair or not.
    """
    if targets is not NOTHING:
        batch = inputs, targets
        return [(batch, batch)] if is_one else [batch]
    if is_list(inputs):
        if not inputs:
            raise ValueError("the list of batches is empty; give at least one batch")
        return [pair for each in inputs for pair in pairs_of(as_batch(each), NOTHING, is_one)]
    batch = as_batch(inputs)
    if is_one or not isinstance(batch, tuple) or len(batch) != 2:
        return [(batch, batch)]
    return [batch]


def is_list(given: Any) -> bool:
    """Whether it is a list of batches, and not a batch."""
    return isinstance(given, list) and not any(isinstance(each, Tensor) for each in given)


def as_batch(given: Any) -> Any:
    """Turn a loader's list of tensors into a tuple; other batches stay as they are."""
    return tuple(given) if isinstance(given, list) else given


class Objective:
    """The loss that `prepare` was given, in one of its three forms.

    given: a function of outputs and targets; or one of a model and a batch, whose first argument is called
        `model`; or None for the model's own, or else `cross_entropy`.
    """

    def __init__(self, given: Loss | None, model: nn.Module) -> None:
        self.given, self._model = given, model
        self.takes_model = takes_model(given)

    def function(self, outputs: Any, inputs: Any, targets: Any, cp: int = 1) -> Loss:
        """The function of outputs and targets to use for a model's outputs. cp: of the layout."""
        if self.given is not None:
            return self.given
        if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            return cross_entropy
        if own_loss(outputs) is None:
            raise TypeError(
                f"the model gave a {type(outputs).__name__} without a loss of its own; pass what it needs to "
                "compute one, such as labels, or give prepare a loss of outputs and targets"
            )
        if cp > 1:
            raise ValueError(
                f"the model computes its loss itself, and cp={cp} gives each rank only some of a row's "
                "tokens, of which it would not know the next; give prepare a loss of outputs and targets, or "
                "cp=1"
            )
        return lambda outputs, _: (own_loss(outputs), labels_of(self._model, inputs))

    def is_cross_entropy(self, inputs: Any, targets: Any) -> bool:
        """Whether the loss is sure to be `cross_entropy`, a mean over rows without a weight."""
        if self.given is None:
            return isinstance(inputs, Tensor) and isinstance(targets, Tensor)
        return self.given is cross_entropy


def takes_model(function: Loss | None) -> bool:
    """Whether a loss or a metric takes the model and a batch."""
    return function is not None and first_argument(function) == "model"


def own_loss(outputs: Any) -> Any:
    """The loss in what a model returned, or None."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def labels_of(model: nn.Module, batch: Any) -> Weight:
    """Over how much the own loss of a model of transformers is a mean: the labels that are not ignored.

    Models that predict the next token do not use the first label of a row. Without integer labels, and for
    other models, it is the number of rows.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or labels.is_floating_point() or not hasattr(model, "loss_type"):
        return float(rows_of(batch))
    # transformers takes a loss of which it does not know the type for that of the next token.
    next_token = model.loss_type in (None, "ForCausalLM", "ForConditionalGeneration")
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if next_token and not encodes and labels.dim() > 1:
        labels = labels[..., 1:]
    counted: Tensor = (labels != IGNORED).sum()
    return counted.double()


def weighted(result: Any, own: float) -> tuple[Tensor, Weight]:
    """A loss's result as (mean, weight); `own` is the weight of one that returns the mean alone."""
    mean, weight = result if isinstance(result, tuple) else (result, own)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        what = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else repr(mean)
        raise TypeError(f"the loss or metric returned {what}; let it return its mean, a tensor of 1 element")
    return mean, weight.detach().double() if isinstance(weight, Tensor) else float(weight)


def times(mean: Tensor, weight: Weight) -> Tensor:
    """The product; 0 where the weight is 0, whatever the mean over nothing is."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, mean * weight)
    return mean * weight if weight else torch.zeros_like(mean)
