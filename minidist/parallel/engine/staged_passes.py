"""A step's passes through a pipeline's stages, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.contract.batch import joined, rows_of
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.engine.partition_model import RankModel
from minidist.parallel.engine.step_executor import Factor, RankBatch, StepExecutor, Weight, times
from minidist.parallel.pipeline.execution import Pipeline
from minidist.parallel.pipeline.tied_parameters import copy_from_first, sum_tied
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.training.precision import Precision


class StagedPasses(StepExecutor):
    """A pipeline's schedule of passes through this rank's stages.

    Gradients are sent during the last backward pass and summed after the schedule, so that a stage's last
    message to the stage before waits for no sum. They are sent after all passes if a rank has several chunks,
    each with a last pass of its own, or if sharded gradients have to be summed over stages first.

    Tied parameters have a gradient on each stage that uses them. The sum over these stages comes last, so
    that all copies take the same step to the last bit. With sharded gradients no rank has a whole gradient at
    that point: then the sum comes first, copies differ by rounding after the step, and take the first stage's
    values.
    """

    def __init__(
        self, part: RankModel, strategy: Sharded, layout: Layout, loss: Loss | None, precision: Precision
    ) -> None:
        super().__init__(part, strategy, layout, loss, precision)
        self.group = part.mesh.group("pp")
        self._token_fraction, self._is_padding = 1.0, False
        self._total: Weight = 0.0  # of the losses so far
        self._parts = layout.micro_batches if self.meets else None
        self.pipeline = Pipeline(
            part.stages,
            layout.schedule,
            layout.micro_batches,
            loss=self._product,
            group=self.group,
            reduction="sum",
        )
        self.has_loss = self.pipeline.rank == self.pipeline.loss_rank

    def _product(self, outputs: Any, targets: Any) -> Tensor:
        """A micro-batch's loss times its weight, on the last stage."""
        if self.precision.dtype is not None:
            outputs = self.precision.outputs(outputs)
        own = rows_of(targets) * self._token_fraction
        loss, weight = self.score(None, outputs, targets, targets, own)
        weight = 0.0 if self._is_padding else weight
        self._total = self._total + weight
        takes_part = self.meets or not self._is_padding
        if takes_part and isinstance(weight, float) and not weight:
            return loss * 0.0  # in the backward pass of ring attention, or of experts that ranks share
        return times(loss, weight)

    def train(self, batches: Sequence[RankBatch], factor: Factor) -> None:
        """Run the schedule; gradients are sent in the last backward pass if `overlaps`, or else after it."""
        strategy = self.strategy
        strategy.ready()
        self._total = 0.0
        done = torch.zeros((), dtype=torch.float64, device=self.device)
        by_rows = sum(batch.weight for batch in batches)

        def total() -> Weight:
            return self._total if self.has_loss else by_rows

        with ExitStack() as accumulating:
            accumulating.enter_context(strategy.no_sync())

            def last(loss_sum: Tensor) -> None:
                accumulating.close()
                strategy.begin_final_backward(total(), done + loss_sum, waits=False)

            for number, batch in enumerate(batches, 1):
                overlaps = self.overlaps and number == len(batches)
                self._token_fraction, self._is_padding = batch.token_fraction, batch.is_padding
                self.announce(batch.is_padding)
                inputs = self._stage_inputs(batch.inputs)
                done = done + self.pipeline.run(
                    inputs,
                    batch.targets,
                    lambda _: float(factor(1.0)),
                    before_last=last if overlaps else None,
                    parts=self._parts,
                )
        if not overlaps:
            if strategy.sharded:
                self._with_tied(sum_tied)
            strategy.begin_final_backward(total(), done)

    @property
    def overlaps(self) -> bool:
        """Whether gradients are sent during the last backward pass."""
        return self.layout.chunks == 1 and not (self.strategy.sharded and self.part.tied)

    def summed(self) -> None:
        """Sum the gradients of tied copies over the stages."""
        if not self.strategy.sharded:
            self._with_tied(sum_tied)

    def updated(self) -> None:
        """Give tied copies the first stage's values, if their gradients were sharded."""
        if self.strategy.sharded:
            self._with_tied(copy_from_first)

    def _with_tied(self, act: Callable[[nn.Parameter | None, Group, Sequence[int]], None]) -> None:
        for tied in self.part.tied:
            parameter = None if tied.name is None else self.part.model.get_parameter(tied.name)
            act(parameter, self.group, tied.stages)

    def evaluate(self, batch: RankBatch, metrics: Sequence[Loss | None]) -> Tensor:
        """The metrics of the pipeline's outputs, on the last stage."""
        table = torch.zeros(len(metrics), 2, dtype=torch.float64, device=self.device)

        def add(outputs: Any, targets: Any) -> Tensor:
            outputs = self.precision.outputs(outputs)
            own = rows_of(targets) * batch.token_fraction
            for row, metric in zip(table, metrics, strict=True):
                mean, weight = self.score(metric, outputs, targets, targets, own)
                weight = 0.0 if batch.is_padding else weight
                row[0] += times(mean.double(), weight)
                row[1] += weight
            return table.sum()  # nobody reads it

        inputs = self._stage_inputs(batch.inputs)
        self.pipeline.run(inputs, batch.targets, train=False, loss=add, parts=self._parts)
        return table

    def predict(self, inputs: Any) -> Any:
        """The outputs of the last stage."""
        found: list[Any] = []

        def keep(outputs: Any, given: Any) -> Tensor:
            if rows_of(given) or not found:
                found.append(self.whole(self.precision.outputs(outputs)))
            return torch.zeros((), device=self.device)

        x = self._stage_inputs(inputs)
        self.pipeline.run(x, x, train=False, loss=keep, parts=self._parts)
        return joined(found) if found else None

    def _stage_inputs(self, inputs: Any) -> Any:
        """The inputs as the first stage takes them: in its dtype; one tensor, if it is nothing but layers."""
        if not isinstance(inputs, Tensor) and not getattr(self.part.stages[0], "takes_batch", False):
            raise TypeError(
                f"the inputs are a {type(inputs).__name__}, and the model is a chain of layers, of which the "
                "first takes one tensor; give engine.step(inputs, targets)"
            )
        return inputs if self.precision.dtype is None else self.precision.inputs(inputs)
