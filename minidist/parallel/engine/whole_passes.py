"""A step's passes through all layers: a forward and a backward pass for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.contract.batch import call, rows_of
from minidist.parallel.contract.engine import Loss, evaluating, unchanged
from minidist.parallel.engine.objective import Weight, times, weighted
from minidist.parallel.engine.rank_model import RankBatch
from minidist.parallel.engine.step_executor import Factor, StepExecutor


class WholePasses(StepExecutor):
    """A forward and a backward pass through all layers for each micro-batch."""

    def train(self, batches: Sequence[RankBatch], factor: Factor) -> None:
        """Run all micro-batches; gradients are sent while the last backward pass runs."""
        pieces = [piece for batch in batches for piece in self._micro_batches(batch)]
        if self.check is not None and (self.objective.given is None or self.objective.takes_model):
            self._compare_passes(pieces[0])
        total: Weight = 0.0
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            with nullcontext() if last else self.strategy.no_sync():
                loss, weight = self._loss(piece)
                weight = weight if piece.counts else 0.0
                total = total + weight
                loss_sum += times(loss.detach().double(), weight)
                if last:
                    self.strategy.begin_final_backward(total, loss_sum)
                (loss * factor(weight)).backward()  # type: ignore[no-untyped-call]

    def _micro_batches(self, batch: RankBatch) -> list[RankBatch]:
        parts = self.layout.micro_batches
        found = batch.split(parts)
        if self.strategy.gathers:  # passes are collectives, and all ranks need the same number
            found += [replace(found[-1], counts=0.0)] * (parts - len(found))
        return found

    def _loss(self, piece: RankBatch) -> tuple[Tensor, Weight]:
        objective = self.objective
        if objective.takes_model:
            assert objective.given is not None
            return weighted(objective.given(self._called, piece.inputs), piece.weight)
        outputs = self._forward(piece.inputs)  # freed when this returns, before the backward pass
        if self.check is not None:
            self.compare(outputs, piece.inputs, piece.targets)
        return self.score(None, outputs, piece.inputs, piece.targets, piece.weight)

    @cached_property
    def _called(self) -> CalledModel:
        return CalledModel(self)

    def _compare_passes(self, piece: RankBatch) -> None:
        """In the first step, compare a loss that needs the model's passes, in evaluation mode."""
        check, self.check = self.check, None
        assert check is not None

        @unchanged(self.part.model, self.objective.given)
        def of(given: tuple[Any, Any]) -> tuple[Tensor, Weight]:
            inputs, targets = given
            return self._loss(replace(piece, inputs=inputs, targets=targets, rows=rows_of(inputs)))

        with evaluating([self.part.model]):
            check.compare(of, (piece.inputs, piece.targets), self.precision.dtype)

    def _forward(self, inputs: Any) -> Any:
        return self.precision.outputs(call(self.strategy.forward, self.precision.inputs(inputs)))

    def evaluate(self, batch: RankBatch, metrics: Sequence[Loss | None]) -> Tensor:
        """The metrics of the whole model's outputs, which are computed once."""
        table = torch.zeros(len(metrics), 2, dtype=torch.float64, device=self.device)
        outputs: Any = None
        for row, metric in zip(table, metrics, strict=True):
            if metric is None and self.objective.takes_model:
                mean, weight = self._loss(batch)
            else:
                outputs = self._forward(batch.inputs) if outputs is None else outputs
                mean, weight = self.score(metric, outputs, batch.inputs, batch.targets, batch.weight)
            weight = weight if batch.counts and batch.rows else 0.0
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for these inputs."""
        precision = self._passes.precision
        args, kwargs = precision.inputs((args, kwargs))
        return precision.outputs(self._passes.strategy.forward(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._passes.part.model, name)
