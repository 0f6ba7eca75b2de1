"""A rank's part of a model, and a step's passes through it: through all layers, or a pipeline's stages.

Both cut a batch into micro-batches by rows, multiply each loss by a weight, and add up gradients. They differ
in when they know that a backward pass is the last one, and on which rank the loss is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.comm.mesh import Mesh
from minidist.comm.work import Group
from minidist.model.loss import cross_entropy
from minidist.parallel.context.sequence_share import SequenceShare
from minidist.parallel.contract.engine import Loss
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.strategy import Strategy
from minidist.parallel.engine.parameter_placement import Placement
from minidist.parallel.pipeline.execution import Pipeline
from minidist.parallel.pipeline.tied_parameters import sum_tied, take_first
from minidist.parallel.tensor.vocabulary import gather_logits, vocab_parallel_cross_entropy
from minidist.parallel.training.precision import Precision

Weight = Callable[[int], float]
"""From a micro-batch's rows to the factor on its loss."""


@dataclass(frozen=True)
class Tied:
    """A parameter of which several stages of a pipeline hold a copy."""

    name: str | None  # on this rank; None if it has no copy
    stages: tuple[int, ...]


@dataclass(frozen=True)
class RankModel:
    """This rank's part of a model."""

    model: nn.Module  # the part, with the whole's names
    mesh: Mesh  # of all ranks
    placement: Placement  # where its parameters lie in the whole
    share: SequenceShare | None  # of the tokens; None without cp
    stages: tuple[nn.Module, ...]  # the modules of this rank's pipeline chunks; empty without pp
    tied: tuple[Tied, ...]  # parameters whose gradients are summed over stages
    vocabulary: int | None  # its size if outputs are this rank's part of the logits; None if they are whole

    def loss(self, loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
        """A loss or a metric of this rank's outputs.

        If the ranks share the logits, `cross_entropy` becomes `vocab_parallel_cross_entropy`; for any other
        function the logits are gathered, which sends more.
        """
        if not targets.numel():
            return outputs.sum()  # 0, as this rank has no rows or no tokens of them
        if self.vocabulary is None:
            return loss(outputs, targets)
        group = self.mesh.group("tp")
        if loss is cross_entropy:
            return vocab_parallel_cross_entropy(outputs, targets, group, self.vocabulary)
        return loss(gather_logits(outputs, group, self.vocabulary), targets)

    def cut(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
        """This rank's tokens of its rows, (B, T) each, and their share of all tokens."""
        if self.share is None:
            return inputs, targets, 1.0
        if inputs.dim() < 2 or inputs.shape[:2] != targets.shape[:2]:
            raise ValueError(
                f"inputs are {tuple(inputs.shape)} and targets {tuple(targets.shape)}, and "
                f"cp={self.share.ranks} cuts rows of tokens; give (B, T) and a target for each token, or a "
                "layout with cp=1"
            )
        return self.share.cut(inputs), self.share.cut(targets), self.share.part


class StepExecutor(ABC):
    """Runs the passes of `part`, this rank's part of a model; `strategy` sums the gradients."""

    def __init__(
        self, part: RankModel, strategy: Strategy, layout: Layout, loss: Loss, precision: Precision
    ) -> None:
        self.part, self.strategy, self.layout = part, strategy, layout
        self.given, self.precision = loss, precision

    @abstractmethod
    def train(self, inputs: Tensor, targets: Tensor, weight: Weight, share: float) -> None:
        """Forward and backward passes; passes this rank's rows and loss, times `share`, to the strategy."""

    def summed(self) -> None:  # noqa: B027 (only a pipeline has tied copies)
        """Give tied copies equal gradients, after the strategy has summed them over its ranks."""

    def updated(self) -> None:  # noqa: B027 (only a pipeline has tied copies)
        """Give tied copies equal values, after the strategy has updated the parameters."""

    @abstractmethod
    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss) -> Tensor:
        """The sum of a metric over rows, () float64; 0 without rows, and before a pipeline's last stage."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        return self.part.loss(self.given, self.precision.outputs(outputs), targets)


class WholePasses(StepExecutor):
    """A forward and a backward pass through all layers for each micro-batch."""

    def train(self, inputs: Tensor, targets: Tensor, weight: Weight, share: float) -> None:
        """Run all micro-batches; gradients are sent while the last backward pass runs."""
        rows, parts = len(inputs), self.layout.micro_batches
        if not self.strategy.gathers:  # else passes are collectives, and all ranks need the same number
            parts = min(parts, rows)
        loss_sum = torch.zeros((), dtype=torch.float64, device=inputs.device)
        pairs = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
        for number, (x, y) in enumerate(pairs, 1):
            last = number == parts
            with nullcontext() if last else self.strategy.no_sync():
                loss = self._loss(x, y)
                loss_sum += loss.detach().double() * (len(x) * share)
                if last:
                    self.strategy.begin_final_backward(rows * share, loss_sum)
                (loss * weight(len(x))).backward()  # type: ignore[no-untyped-call]

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = self._forward(inputs)  # freed when this returns, before the backward pass
        return self.loss(outputs, targets)

    def _forward(self, inputs: Tensor) -> Tensor:
        return self.strategy.forward(self.precision.inputs(inputs))

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss) -> Tensor:
        """The metric of the whole model's outputs, times rows."""
        outputs = self.precision.outputs(self._forward(inputs))
        return self.part.loss(metric, outputs, targets).double() * len(inputs)


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
        self, part: RankModel, strategy: Strategy, layout: Layout, loss: Loss, precision: Precision
    ) -> None:
        super().__init__(part, strategy, layout, loss, precision)
        self.group = part.mesh.group("pp")
        self.pipeline = Pipeline(
            part.stages, layout.schedule, layout.micro_batches, loss=self.loss, group=self.group
        )

    def train(self, inputs: Tensor, targets: Tensor, weight: Weight, share: float) -> None:
        """Run the schedule; gradients are sent in the last backward pass if `overlaps`, or else after it."""
        strategy, rows = self.strategy, len(inputs) * share
        strategy.ready()
        with ExitStack() as accumulating:
            accumulating.enter_context(strategy.no_sync())

            def last(loss_sum: Tensor) -> None:
                accumulating.close()
                strategy.begin_final_backward(rows, loss_sum * share, waits=False)

            inputs = self.precision.inputs(inputs)
            overlaps = len(inputs) and self.overlaps
            loss_sum = self.pipeline.run(inputs, targets, weight, before_last=last if overlaps else None)
        if not overlaps:
            if strategy.sharded:
                self._with_tied(sum_tied)
            strategy.begin_final_backward(rows, loss_sum * share)

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
            self._with_tied(take_first)

    def _with_tied(self, act: Callable[[nn.Parameter | None, Group, Sequence[int]], None]) -> None:
        for tied in self.part.tied:
            parameter = None if tied.name is None else self.part.model.get_parameter(tied.name)
            act(parameter, self.group, tied.stages)

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss) -> Tensor:
        """The metric of the pipeline's outputs, times rows, on the last stage."""

        def own(outputs: Tensor, y: Tensor) -> Tensor:
            return self.part.loss(metric, self.precision.outputs(outputs), y)

        return self.pipeline.run(self.precision.inputs(inputs), targets, train=False, loss=own)
