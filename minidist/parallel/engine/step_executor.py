"""A step's passes through a rank's part of a model: what all have in common, and those through all layers.

All cut a batch into micro-batches by rows, multiply each loss by its weight, and add up gradients. They
differ in when they know that a backward pass is the last one, and on which rank the loss is. A pipeline's
passes are in staged_passes.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.contract.batch import call, rows_of, tensors
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.strategy import Strategy
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.engine.rank_model import (
    Objective,
    RankBatch,
    RankModel,
    Weight,
    takes_model,
    times,
    weighted,
)
from minidist.parallel.training.batch_norm import batch_norms, leave_out_rows
from minidist.parallel.training.precision import Precision

Factor = Callable[[Weight], Weight]
"""From the weight of a micro-batch's loss to the factor on it."""


class StepExecutor(ABC):
    """Runs the passes of `part`, this rank's part of a model; `strategy` sums the gradients."""

    def __init__(
        self, part: RankModel, strategy: Strategy, layout: Layout, loss: Loss | None, precision: Precision
    ) -> None:
        self.part, self.strategy, self.layout = part, strategy, layout
        self.objective, self.precision = Objective(loss, part.model), precision
        self.device = next((p.device for p in part.model.parameters()), part.placement.device)
        self.has_loss = True  # a pipeline's is on its last stage
        self.is_weighted = False  # whether the loss has returned a weight

    @abstractmethod
    def train(self, batches: Sequence[RankBatch], factor: Factor) -> None:
        """Forward and backward passes; passes the weight of this rank's losses and their sum to the strategy.

        factor: from a loss's weight to the factor on it.
        """

    def announce(self, is_padding: bool) -> None:
        """Say whether the next pass is padding: then it uses no parameter, and moves no statistic."""
        self.strategy.gradient_comm.counts = not is_padding
        leave_out_rows(self._batch_norms, is_padding)

    @cached_property
    def _batch_norms(self) -> list[Any]:
        return [norm for _, norm in batch_norms(self.part.model)]

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

    def score(
        self, function: Loss | None, outputs: Any, inputs: Any, targets: Any, weight: float
    ) -> tuple[Tensor, Weight]:
        """A metric of outputs, or the loss for None, and its weight; `weight` if the function gives none."""
        if not rows_of(targets) * self._tokens:
            return _zero(outputs), 0.0
        is_loss = function is None and torch.is_grad_enabled()
        function = function or self.objective.function(outputs, inputs, targets, self.layout.cp)
        result = self.part.loss(function, outputs, targets)
        self.is_weighted |= isinstance(result, tuple)
        found = weighted(result, weight)
        if is_loss and not found[0].requires_grad and any(x.requires_grad for _, x in tensors(outputs)):
            raise ValueError(
                "the loss has no gradient, and the outputs that it was given have one; compute it from them "
                "with torch's operations, without .detach(), .item(), .data or torch.no_grad()"
            )
        return self._without_nan(found, outputs)

    @staticmethod
    def _without_nan(found: tuple[Tensor, Weight], outputs: Any) -> tuple[Tensor, Weight]:
        """A mean over nothing as a 0: the gradient of 0 / 0 would be NaN, even times its weight, 0."""
        mean, weight = found
        if not mean.requires_grad or float(weight):
            return found
        return (_zero(outputs), 0.0) if any(x.requires_grad for _, x in tensors(outputs)) else found

    @property
    def _tokens(self) -> int:
        """How many of a row's tokens this rank has; 1 if rows are not cut."""
        return 1 if self.part.token_share is None else self.part.token_share.size


def _zero(outputs: Any) -> Tensor:
    """0, of which the backward pass reaches everything that has no rows, or no tokens of them."""
    floating = [x for _, x in tensors(outputs) if x.is_floating_point()]
    return sum((x.sum() for x in floating[1:]), floating[0].sum())


class WholePasses(StepExecutor):
    """A forward and a backward pass through all layers for each micro-batch."""

    def train(self, batches: Sequence[RankBatch], factor: Factor) -> None:
        """Run all micro-batches; gradients are sent while the last backward pass runs."""
        pieces = [piece for batch in batches for piece in self._micro_batches(batch)]
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

    def _micro_batches(self, batch: RankBatch) -> list[RankBatch]:
        parts = self.layout.micro_batches
        found = batch.split(parts)
        if self.strategy.gathers:  # passes are collectives, and all ranks need the same number
            found += [found[-1]._replace(is_padding=True)] * (parts - len(found))
        return found

    def _loss(self, piece: RankBatch) -> tuple[Tensor, Weight]:
        objective = self.objective
        if objective.takes_model:
            return self._of_model(objective.given, piece)
        outputs = self._forward(piece.inputs)  # freed when this returns, before the backward pass
        return self.score(None, outputs, piece.inputs, piece.targets, piece.weight)

    def _of_model(self, function: Any, piece: RankBatch) -> tuple[Tensor, Weight]:
        """A loss or a metric that takes the model and the batch, and its weight."""
        is_one = self.objective.takes_model  # then inputs and targets are the batch
        batch = piece.inputs if is_one else (piece.inputs, piece.targets)
        found = weighted(function(self._called, batch), piece.weight)
        outputs, self._called._outputs = self._called._outputs, []
        return self._without_nan(found, outputs) if outputs else found

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
            weight = 0.0 if batch.is_padding or not batch.rows else weight
            row[0] += times(mean.double(), weight)
            row[1] += weight
        return table

    def predict(self, inputs: Any) -> Any:
        """The whole model's outputs."""
        return self.part.whole(self._forward(inputs))


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
        return self._passes.part.whole(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._passes.part.model, name)
