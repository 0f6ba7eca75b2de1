"""Pipeline parallelism: a model's layers are cut into stages, and micro-batches flow through them.

While one rank computes on a micro-batch, the next rank computes on the one before it. A schedule, which is
data (../schedules/), says in which order; this file executes it. Each instruction is a forward or backward
pass of a stage, or a message to a neighbour.

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", and 2021; Qi et al. 2023.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.model.loss import cross_entropy
from minidist.parallel import schedules
from minidist.parallel.contract.batch import check_rows, require_batch, rows_of, shapes, split
from minidist.parallel.contract.batch import rows as some_rows
from minidist.parallel.contract.kept_attributes import evaluating
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.guards.refusals import gradients_are_off, require_metric
from minidist.parallel.pipeline.pipeline_checks import check_pipeline_arguments, check_stages
from minidist.parallel.pipeline.schedule_run import ScheduleRun
from minidist.parallel.pipeline.stage_messages import (
    RankPlan,
    StageMessages,
    agree_on_runs,
    broadcast_loss,
)
from minidist.parallel.pipeline.tied_parameters import start_tied_equal, sum_tied
from minidist.parallel.schedules.instructions import Schedule
from minidist.parallel.schedules.simulation import Event

COMPLETE = ("backward", "backward_weight")
"""Instructions that complete a micro-batch's weight gradients."""


class Pipeline:
    """This rank's stages of a model, and the schedule by which all ranks train it, in a loop of your own.

    >>> stages = [nn.Sequential(*(model.layers[i] for i in own)) for own in cut(model.layers, 2)]
    >>> pipeline = md.Pipeline(stages[md.rank()], schedule="1f1b", micro_batches=8)
    >>> optimizer.zero_grad()
    >>> loss = pipeline.step(inputs, targets)  # fills .grad
    >>> optimizer.step()

    Stage s is chunk s // p of rank s % p, unless the schedule places it elsewhere. One floating-point tensor
    goes from stage to stage, or a tuple of several, such as a hidden state and a mask; the first run finds
    their shapes. The gradients equal those of one process on the whole batch if the model is its stages one
    after the other; `layer_chain.require_chain` tells whether a model's `forward` does more. All ranks
    construct it together: each sends 16 (p - 1) + 16 (p - 1) / p bytes to check that they agree, and tied
    copies.

    If a step fails on one rank, it also fails on the ranks of the same host that wait for it, and all may go
    on with another batch. Ranks that wait for messages of more than 4 MiB, over sockets or NCCL, or for tied
    copies are not told: they fail at their time limit, and the run ends.

    Args:
        stages: this rank's modules in the order of the chunks, or one module.
        schedule: a name in `schedules.SCHEDULES`, such as "1f1b", or one of your own that passes
            `schedules.check`; the same on all ranks.
        micro_batches: into how many a batch is cut; None for 8, or for as many as your own schedule has. A
            batch of fewer rows has as many micro-batches as rows; your own schedule refuses it.
        loss: from outputs and targets to a scalar, on the last stage.
        group: the ranks, in the order of the stages; None for all.
        reduction: what `loss` is: "mean" over its rows, or a "sum" over them, which micro-batches add up.
        tied: for each parameter that several ranks hold a copy of, this rank's copy or None; the same number
            on all ranks. Copies start from the first rank's values, and `step` sums their gradients. If you
            combine this with data parallelism, leave `tied` empty and call `tied_parameters.sum_tied` after
            the data-parallel sum, as `prepare` does: otherwise copies drift apart by rounding.

    Raises:
        TypeError, ValueError: an argument is wrong, or the schedule is not for these ranks and chunks, or
            the ranks were given different ones.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: str | Schedule = DEFAULT_SCHEDULE,
        micro_batches: int | None = None,
        loss: Loss = cross_entropy,
        group: Group = None,
        reduction: str = "mean",
        tied: Sequence[nn.Parameter | None] = (),
    ) -> None:
        self.stages = check_stages(stages)
        self.loss, self.group, self.reduction, self._schedule = loss, group, reduction, schedule
        chunks = len(self.stages)
        self.micro_batches = check_pipeline_arguments(
            schedule, micro_batches, chunks, loss, reduction, tied, group
        )
        self.rank, self.ranks = rank_in(group), len(ranks_of(group))
        self._plans: dict[tuple[int, bool], RankPlan] = {}
        # Making the plan refuses sizes that the schedule does not take.
        self.placement = self._plan(self.micro_batches, True).placement
        self.loss_rank = self.placement.ranks[-1]  # which has the last stage
        self._timed: list[list[Event]] = []
        agree_on_runs(group)
        self.tied = [(parameter, start_tied_equal(parameter, group)) for parameter in tied]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward over a batch: gradients are added to `.grad`, those of tied copies summed.

        Sends each stage's output and its gradient once, 80 bytes before each output whose shape is new, 8 (p
        - 1) bytes for the loss from the rank that has the last stage, and what `sum_tied` sends. Returns the
        mean loss over the rows, or the sum, the same on all ranks.

        Args:
            inputs, targets: (rows, ...), the same on all ranks; for the first stage, and the last one's loss.

        Raises:
            ValueError: no rows, fewer than your own schedule needs, or inputs and targets of other lengths.
            RuntimeError: gradients are off, as in `torch.no_grad()`.
            CollectiveError: a peer is gone or late.
        """
        rows = check_rows(inputs, targets)
        # These two raise every error of the batch before a receive is posted.
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise gradients_are_off()
        self._parts(rows)
        held = [(p, ranks, None if p is None else p.grad) for p, ranks in self.tied]
        for parameter, _, _ in held:
            if parameter is not None:
                parameter.grad = None
        with broadcast_loss(self.group, self.loss_rank, self.device) as tell:
            total = self.run(inputs, targets, lambda own: own / rows if self.reduction == "mean" else 1.0)
            for parameter, ranks, before in held:
                sum_tied(parameter, self.group, ranks)
                if parameter is not None and before is not None:
                    parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
            return tell(total) / (rows if self.reduction == "mean" else 1)

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean over a batch's rows of a metric, or of the loss, without training; the same on all ranks.

        `metric(outputs, targets)` is a mean over rows. Without rows, the mean is NaN.
        """
        require_batch(inputs, targets)
        require_metric(metric)
        rows = len(inputs)
        self._parts(rows)
        with broadcast_loss(self.group, self.loss_rank, self.device) as tell:
            total = tell(self.run(inputs, targets, train=False, loss=metric))
        if metric is None and self.reduction == "sum":
            return total
        return total / rows if rows else float("nan")

    def run(
        self,
        inputs: Any,
        targets: Any,
        weight: Callable[[int], float] | None = None,
        train: bool = True,
        loss: Loss | None = None,
        before_last: Callable[[Tensor], None] | None = None,
        parts: int | None = None,
    ) -> Tensor:
        """Execute the schedule once over a batch; `step` and `evaluate` are made of it.

        Args:
            inputs, targets: see `step`; without rows nothing is done.
            weight: from a micro-batch's rows to the factor on its loss before the backward pass; None for 1.
            train: whether to run backward passes; without them the stages are in evaluation mode.
            loss: instead of the pipeline's own.
            before_last: called with the returned tensor before this rank's last backward pass, which, with
                one chunk a rank, completes the gradients.
            parts: how many micro-batches. Too few rows come again without targets, so the loss has to take
                none. None for at most as many as rows.

        Returns:
            On the last stage's rank the sum of loss times rows over the micro-batches (of losses alone if the
            pipeline's own is a sum), a float64 scalar; on the others 0.
        """
        parts = self._parts(rows_of(inputs)) if parts is None else parts
        if train and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            raise gradients_are_off()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if not parts:
            return total
        by_rows = loss is not None or self.reduction == "mean"
        with_rows = min(parts, rows_of(inputs)) or parts
        xs, ys = [*split(inputs, with_rows)], [*split(targets, with_rows)]
        xs += xs[-1:] * (parts - with_rows)
        ys += [some_rows(targets, slice(0))] * (parts - with_rows)
        last_stage, own = len(self.placement.ranks) - 1, self.placement.stages[self.rank]
        passes = ScheduleRun(
            self.stages, own, last_stage, self.device, xs, ys, loss or self.loss, total, weight, by_rows
        )
        plan = self._plan(parts, train)
        last = next((e for e in reversed(plan.instructions) if e.kind in COMPLETE), None)
        with nullcontext() if train else evaluating(self.stages):
            self._messages.begin(plan, [(shapes(x), train) for x in passes.inputs])
            try:
                for each in plan.instructions:
                    if before_last is not None and each is last:
                        before_last(total)
                    start = time.perf_counter()
                    passes.execute(each, self._messages)
                    for events in self._timed:
                        events.append(Event(each, start, time.perf_counter()))
                self._messages.finish()
            except BaseException:
                self._messages.drop()
                raise
        return total

    def _parts(self, rows: int) -> int:
        """How many micro-batches these rows make; ValueError if they are too few for your own schedule."""
        if 0 < rows < self.micro_batches and not isinstance(self._schedule, str):
            raise ValueError(
                f"inputs have {rows} rows and the schedule {self.micro_batches} micro-batches; give at least "
                "a row for each, or name a schedule, which is then made for the rows that there are"
            )
        return min(self.micro_batches, rows)

    def _plan(self, micro_batches: int, train: bool) -> RankPlan:
        """What this rank does; made on the first call."""
        if (micro_batches, train) not in self._plans:
            schedule = self._schedule
            if isinstance(schedule, str):
                schedule = schedules.by_name(schedule, self.ranks, micro_batches, len(self.stages))
            if not train:
                schedule = schedules.forward_only(schedule)
            self._plans[micro_batches, train] = RankPlan.of(schedule, self.rank)
        return self._plans[micro_batches, train]

    @contextmanager
    def timed(self) -> Iterator[list[Event]]:
        """Inside, note when this rank began and ended each instruction, to compare with `schedules.simulate`.

        Yields a list of events in seconds of `time.perf_counter`, which the ranks of a host share. On a GPU
        they are the times at which the work was queued. Several may be open at once.
        """
        events: list[Event] = []
        self._timed.append(events)
        try:
            yield events
        finally:
            self._timed = [each for each in self._timed if each is not events]  # equal lists are not the same

    @cached_property
    def device(self) -> torch.device:
        """Where this rank computes: the device of its parameters."""
        parameters = (p for stage in self.stages for p in stage.parameters())
        return next((p.device for p in parameters), comm.device())

    @cached_property
    def _messages(self) -> StageMessages:
        return StageMessages(self.group, self.device)
