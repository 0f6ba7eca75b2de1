"""The passes of a step through this rank's part of a model, and the loss that they are for.

Ranks and micro-batches have parts of one global batch, and a step takes the mean of their losses. For that
each loss has to be a mean itself, and to say over how much: over rows, unless it returns (mean, weight), such
as the number of tokens that count. (rehearsal.py compares.)

An executor cuts a batch into micro-batches by rows, multiplies each loss by its weight, and adds up
gradients. `WholePasses` go through all layers; a pipeline's passes are in staged_passes.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.model.loss import cross_entropy
from minidist.parallel.contract.batch import Pair, call, mapped, rows_of, split, tensors, to_device
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.user_functions import Loss, first_argument
from minidist.parallel.engine.partition_model import RankModel
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.tensor_parallel.vocabulary import gather_logits, vocab_parallel_cross_entropy
from minidist.parallel.training.batch_norm import synchronized
from minidist.parallel.training.precision import Precision

Weight = float | Tensor
"""The denominator of a loss's mean: a number, or a scalar tensor so that the CPU need not wait for it."""
Factor = Callable[[Weight], Weight]
"""From the weight of a micro-batch's loss to the factor on it."""
IGNORED = -100
"""The label that transformers, and torch by default, leave out of a loss."""


class RankBatch(NamedTuple):
    """This rank's part of a global batch, or a micro-batch of it."""

    inputs: Any
    targets: Any  # the inputs themselves if the batch is one
    rows: int
    token_fraction: float = 1.0  # of the rows' tokens, which context parallelism deals to ranks
    is_padding: bool = False  # computed so that this rank takes part in collectives; counts nothing

    @property
    def weight(self) -> float:
        """The denominator of its loss's mean, if the loss does not say."""
        return 0.0 if self.is_padding else self.rows * self.token_fraction

    def split(self, parts: int) -> list[RankBatch]:
        """So many micro-batches, or one for each row if there are fewer rows."""
        parts = min(parts, self.rows)
        if parts <= 1:
            return [self]
        inputs = split(self.inputs, parts)
        targets = inputs if self.targets is self.inputs else split(self.targets, parts)
        pairs = zip(inputs, targets, strict=True)
        return [self._replace(inputs=x, targets=y, rows=rows_of(x)) for x, y in pairs]


class StepExecutor(ABC):
    """Runs the passes of `part`, this rank's part of a model; `strategy` sums the gradients."""

    def __init__(
        self, part: RankModel, strategy: Sharded, layout: Layout, loss: Loss | None, precision: Precision
    ) -> None:
        self.part, self.strategy, self.layout = part, strategy, layout
        self.objective, self.precision = Objective(loss, part.model), precision
        self.device = next((p.device for p in part.model.parameters()), part.tensor_map.device)
        self.logits_group = part.mesh.group("tp")  # the ranks that have parts of the logits, if any do
        self.has_loss = True  # a pipeline's is on its last stage
        self.is_weighted = False  # whether the loss has returned a weight
        # Whether passes are collectives, on any stage: then all ranks need as many, also without rows.
        self.meets = strategy.gathers or layout.ep > 1
        self._synchronized = synchronized(part.model)

    @abstractmethod
    def train(self, batches: Sequence[RankBatch], factor: Factor) -> None:
        """Forward and backward passes; passes the weight of this rank's losses and their sum to the strategy.

        factor: from a loss's weight to the factor on it.
        """

    def summed(self) -> None:  # noqa: B027 (only a pipeline has tied copies)
        """Give tied copies equal gradients, after the strategy has summed them over its ranks."""

    def updated(self) -> None:  # noqa: B027 (only a pipeline has tied copies)
        """Give tied copies equal values, after the strategy has updated the parameters."""

    @abstractmethod
    def evaluate(self, batch: RankBatch, metrics: Sequence[Loss | None]) -> Tensor:
        """The sum of each metric times its weight, and of the weights, (metrics, 2) float64.

        None is the loss. Zeros before a pipeline's last stage.
        """

    @abstractmethod
    def predict(self, inputs: Any) -> Any:
        """The outputs of this rank's rows with all logits; None before a pipeline's last stage."""

    def own_batch(self, pair: Pair, is_padding: bool = False) -> RankBatch:
        """A batch on this rank's device, with this rank's tokens."""
        inputs, targets = pair
        x = to_device(inputs, self.device)
        y = x if targets is inputs else to_device(targets, self.device)
        rows = rows_of(x)
        x, y, token_fraction = self.own_tokens(x, y)
        return RankBatch(x, y, rows, token_fraction, is_padding)

    def own_tokens(self, inputs: Any, targets: Any) -> tuple[Any, Any, float]:
        """This rank's tokens of its rows, (B, T) each, and which fraction of the tokens they are."""
        share = self.part.token_share
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

    def announce(self, is_padding: bool) -> None:
        """Say whether the next pass is padding: then it uses no parameter, and moves no statistic."""
        self.strategy.announce(is_padding)
        for norm in self._synchronized:
            norm.is_padding = is_padding

    def score(
        self, function: Loss | None, outputs: Any, inputs: Any, targets: Any, weight: float
    ) -> tuple[Tensor, Weight]:
        """A metric of outputs, or the loss for None, and its weight; `weight` if the function gives none."""
        own_tokens = 1 if self.part.token_share is None else self.part.token_share.size
        if not rows_of(targets) * own_tokens:
            return _zero(outputs), 0.0
        is_loss = function is None and torch.is_grad_enabled()
        function = function or self.objective.function(outputs, inputs, targets, self.layout.cp)
        if self.part.vocabulary is not None and function is cross_entropy:
            result: Any = vocab_parallel_cross_entropy(
                outputs, targets, self.logits_group, self.part.vocabulary
            )
        else:
            result = function(self.whole(outputs), targets)
        self.is_weighted |= isinstance(result, tuple)
        found = weighted(result, weight)
        if is_loss and not found[0].requires_grad and any(x.requires_grad for _, x in tensors(outputs)):
            raise ValueError(
                "the loss has no gradient, and the outputs that it was given have one; compute it from them "
                "with torch's operations, without .detach(), .item(), .data or torch.no_grad()"
            )
        return _without_nan(found, outputs)

    def whole(self, outputs: Any) -> Any:
        """Outputs with all logits, if tp ranks share them: the "logits", or else the first tensor."""
        if self.part.vocabulary is None:
            return outputs
        named = isinstance(outputs, Mapping) and "logits" in outputs
        logits: Tensor = outputs["logits"] if named else next(x for _, x in tensors(outputs))
        gathered = gather_logits(logits, self.logits_group, self.part.vocabulary)
        return mapped(lambda x: gathered if x is logits else x, outputs)


class WholePasses(StepExecutor):
    """A forward and a backward pass through all layers for each micro-batch."""

    def train(self, batches: Sequence[RankBatch], factor: Factor) -> None:
        """Run all micro-batches. Whole gradients are sent in the last backward pass, shares in each."""
        pieces, parts = list[RankBatch](), self.layout.micro_batches
        for batch in batches:
            pieces += (own := batch.split(parts))
            if self.meets:
                pieces += [own[-1]._replace(is_padding=True)] * (parts - len(own))
        total: Weight = 0.0
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            with nullcontext() if last else self.strategy.no_sync():
                self.announce(piece.is_padding)
                loss, weight = self._loss(piece)
                weight = 0.0 if piece.is_padding else weight
                total = total + weight
                loss_sum += times(loss.detach().double(), weight)
                if last:
                    self.strategy.begin_final_backward(total, loss_sum)
                (loss * factor(weight)).backward()  # type: ignore[no-untyped-call]

    def _loss(self, piece: RankBatch) -> tuple[Tensor, Weight]:
        if self.objective.takes_model:
            return self._of_model(self.objective.given, piece)
        outputs = self._forward(piece.inputs)  # freed when this returns, before the backward pass
        return self.score(None, outputs, piece.inputs, piece.targets, piece.weight)

    def _of_model(self, function: Any, piece: RankBatch) -> tuple[Tensor, Weight]:
        """A loss or a metric that takes the model and the batch, and its weight."""
        is_one = self.objective.takes_model  # then inputs and targets are the batch
        batch = piece.inputs if is_one else (piece.inputs, piece.targets)
        found = weighted(function(self._called, batch), piece.weight)
        outputs, self._called._outputs = self._called._outputs, []
        return _without_nan(found, outputs) if outputs else found

    @cached_property
    def _called(self) -> CalledModel:
        return CalledModel(self)

    def _forward(self, inputs: Any) -> Any:
        if self.precision.dtype is None:
            return call(self.strategy.forward, inputs)
        return self.precision.outputs(call(self.strategy.forward, self.precision.inputs(inputs)))

    def evaluate(self, batch: RankBatch, metrics: Sequence[Loss | None]) -> Tensor:
        """The metrics of the whole model's outputs, which are computed once."""
        table = torch.zeros(len(metrics), 2, dtype=torch.float64, device=self.device)
        outputs: Any = None
        inputs, targets = batch.inputs, batch.targets
        if self.objective.takes_model and isinstance(inputs, tuple) and len(inputs) == 2:
            inputs, targets = inputs
        for row, metric in zip(table, metrics, strict=True):
            if takes_model(function := metric or self.objective.given):
                try:
                    mean, weight = self._of_model(function, batch)
                except RuntimeError as error:
                    if "does not require grad" not in str(error):
                        raise
                    with torch.enable_grad():  # it differentiates the model
                        mean, weight = self._of_model(function, batch)
            else:
                outputs = self._forward(inputs) if outputs is None else outputs
                mean, weight = self.score(metric, outputs, inputs, targets, batch.weight)
            weight = 0.0 if batch.is_padding else weight
            row[0] += times(mean.double(), weight)
            row[1] += weight
        return table

    def predict(self, inputs: Any) -> Any:
        """The whole model's outputs."""
        return self.whole(self._forward(inputs))


class CalledModel:
    """The `model` that a loss of model and batch gets: a call runs the strategy's forward pass.

    Everything else, such as an attribute, is the module's.
    """

    def __init__(self, passes: WholePasses) -> None:
        self._passes = passes
        self._outputs: list[Any] = []  # of the calls in one loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for these inputs, with all logits."""
        precision = self._passes.precision
        args, kwargs = precision.inputs((args, kwargs))
        found = precision.outputs(self._passes.strategy.forward(*args, **kwargs))
        if torch.is_grad_enabled():
            self._outputs.append(found)
        return self._passes.whole(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._passes.part.model, name)


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
    """How many labels the own loss of a model of transformers is a mean over: those that are not ignored.

    Models that predict the next token do not use the first label of a row. Without integer labels, and for
    other models, it is the number of rows.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or labels.is_floating_point() or not hasattr(model, "loss_type"):
        return float(rows_of(batch))
    # transformers treats an unknown loss as next-token loss.
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
    """The product; 0 where the weight is 0, even if the mean over nothing is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, mean * weight)
    return mean * weight if weight else torch.zeros_like(mean)


def _without_nan(found: tuple[Tensor, Weight], outputs: Any) -> tuple[Tensor, Weight]:
    """A mean over nothing as a 0: the gradient of 0 / 0 would be NaN, even times its weight, 0."""
    mean, weight = found
    if not mean.requires_grad or float(weight):
        return found
    return (_zero(outputs), 0.0) if any(x.requires_grad for _, x in tensors(outputs)) else found


def _zero(outputs: Any) -> Tensor:
    """A zero loss that still reaches every output, for a rank without rows, or without tokens of them."""
    floating = [x for _, x in tensors(outputs) if x.is_floating_point()]
    return sum((x.sum() for x in floating[1:]), floating[0].sum())
