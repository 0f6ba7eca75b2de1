"""Pipeline parallelism: the layers are cut into stages, one or more a rank, and micro-batches flow through.

While one rank computes on a micro-batch the next one computes on the one before it. A schedule, which is data
(schedules.py), says in which order; this file executes it: each instruction is a forward or backward pass of
one stage, or a message to a neighbour.

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", and 2021; Qi et al. 2023.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.engine import Loss, check_rows
from minidist.parallel.contract.evaluation_mode import evaluating, require_gradients
from minidist.parallel.guards.refusals import require_alike, require_batch, require_metric
from minidist.parallel.pipeline import schedules
from minidist.parallel.pipeline.arguments import check_arguments, check_stages, fingerprint
from minidist.parallel.pipeline.broadcast_loss import broadcast_loss
from minidist.parallel.pipeline.instructions import Instruction, Schedule, sizes
from minidist.parallel.pipeline.send_completion import CompletionPlan, receipts
from minidist.parallel.pipeline.simulation import Event
from minidist.parallel.pipeline.stage_messages import StageMessages, agree_on_runs
from minidist.parallel.pipeline.stage_passes import StagePasses
from minidist.parallel.pipeline.tied_parameters import start_equal, sum_tied

MICRO_BATCHES = 8
COMPLETE = ("backward", "backward_weight")
"""Instructions after which a micro-batch's gradients of the weights are there."""


class Pipeline:
    """This rank's stages of a model, and the schedule by which all ranks train it, in a loop of your own.

    >>> stages = [nn.Sequential(*(model.layers[i] for i in own)) for own in cut(model.layers, 2)]
    >>> pipeline = md.Pipeline(stages[md.rank()], schedule="1f1b", micro_batches=8)
    >>> optimizer.zero_grad()
    >>> loss = pipeline.step(inputs, targets)  # fills .grad
    >>> optimizer.step()

    Stage s is chunk s // p of rank s % p. One floating-point tensor goes from stage to stage; its shape is
    found by running once. The gradients equal those of one process on the whole batch, where the stages one
    after the other are the model: what its `forward` does beside them is in no stage (`chain.require_chain`
    tells). All ranks make it together: each sends 16 (p - 1) + 16 (p - 1) / p bytes, to see that they agree,
    and tied copies.

    A step that fails on one rank fails on those of its host that wait for it, too, and all may go on with
    another batch. Ranks that wait for messages of more than 4 MiB, over sockets or NCCL, or for tied copies
    are not told: they fail at their time limit, and the run ends.

    Args:
        stages: this rank's modules in the order of the chunks, or one module.
        schedule: "gpipe", "1f1b", "interleaved", "zero_bubble", or one of your own that passes
            `schedules.check`; the same on all ranks.
        micro_batches: into how many a batch is cut; None for 8, or for as many as your own schedule has. A
            batch of fewer rows has as many micro-batches as rows; your own schedule refuses it.
        loss: from outputs and targets to a scalar, on the last stage.
        group: the ranks, in the order of the stages; None for all.
        reduction: what `loss` is: "mean" over its rows, or a "sum" over them, which micro-batches add up.
        tied: for each parameter that several ranks hold a copy of, this rank's copy or None, the same number
            on all ranks. Copies start from the first rank's values, and `step` sums their gradients. With
            data parallelism beside it, call `tied.sum_tied` after that has summed, instead: else copies
            differ by rounding. `prepare` does.

    Raises:
        TypeError, ValueError: an argument is wrong, or the schedule is not for these ranks and chunks, or
            the ranks were given different ones.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: str | Schedule = "1f1b",
        micro_batches: int | None = None,
        loss: Loss = cross_entropy,
        group: Group = None,
        reduction: str = "mean",
        tied: Sequence[nn.Parameter | None] = (),
    ) -> None:
        self.stages = [stages] if isinstance(stages, nn.Module) else check_stages(stages)
        check_arguments(schedule, loss, reduction, tied)
        self.loss, self.group, self.reduction = loss, group, reduction
        self.rank, self.ranks = rank_in(group), len(ranks_of(group))
        self._named = schedule if isinstance(schedule, str) else None
        self._given = None if isinstance(schedule, str) else schedule
        # Ranks that follow other schedules would wait for messages that nobody sends.
        require_alike(
            "Pipeline",
            {
                "schedule": repr(schedule) if self._named else f"of your own, {fingerprint(schedule)},",
                "micro_batches": micro_batches,
                "chunks": len(self.stages),
                "reduction": reduction,
                "tied copies": len(tied),
            },
            group,
        )
        if self._given is not None:
            schedules.check(self._given, micro_batches, len(self.stages))
            if len(self._given) != self.ranks:
                raise ValueError(
                    f"the schedule is for {len(self._given)} ranks and the group has {self.ranks} ranks"
                )
            micro_batches = sizes(self._given)[1]
        self.micro_batches = MICRO_BATCHES if micro_batches is None else micro_batches
        self._plans: dict[tuple[int, bool], CompletionPlan] = {}
        self._plan(self.micro_batches, True)  # refuses sizes that the schedule does not take
        self._timed: list[list[Event]] = []
        agree_on_runs(group)
        self.tied = [(parameter, start_equal(parameter, group)) for parameter in tied]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward over a batch: gradients are added to `.grad`, those of tied copies summed.

        Sends each stage's output and its gradient once, 8 (p - 1) bytes from the last rank for the loss, and
        what `sum_tied` sends.

        Args:
            inputs: (rows, ...), the same on all ranks; the first stage takes them.
            targets: (rows, ...), the same on all ranks; the last stage's loss takes them.

        Returns:
            The mean loss over the rows, or the sum, the same on all ranks.

        Raises:
            ValueError: no rows, or fewer than your own schedule needs, or inputs and targets do not fit.
            RuntimeError: gradients are off, as in `torch.no_grad()`.
            CollectiveError: a peer is gone or late.
        """
        rows = check_rows(inputs, targets)
        require_gradients()  # before anything is posted
        before = [None if p is None or p.grad is None else p.grad.clone() for p, _ in self.tied]
        for parameter, _ in self.tied:
            if parameter is not None:
                parameter.grad = None
        self._parts(
            inputs, targets
        )  # no error of the batch is left that would come after a receive is posted
        with broadcast_loss(self.group, self.device) as tell:
            total = self.run(inputs, targets, lambda own: own / rows if self.reduction == "mean" else 1.0)
            for (parameter, ranks), grad in zip(self.tied, before, strict=True):
                sum_tied(parameter, self.group, ranks)
                if parameter is not None and grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
            return tell(total) / (rows if self.reduction == "mean" else 1)

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of `metric(outputs, targets)` over a batch's rows, without training, on all ranks.

        Args:
            inputs, targets: see `step`; there may be no rows, and the mean is then NaN.
            metric: a mean over rows; None for the loss.
        """
        require_batch(inputs, targets)
        require_metric(metric)
        rows = len(inputs)
        self._parts(inputs, targets)
        with broadcast_loss(self.group, self.device) as tell:
            total = tell(self.run(inputs, targets, train=False, loss=metric))
        if metric is None and self.reduction == "sum":
            return total
        return total / rows if rows else float("nan")

    def run(
        self,
        inputs: Tensor,
        targets: Tensor,
        weight: Callable[[int], float] | None = None,
        train: bool = True,
        loss: Loss | None = None,
        before_last: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Execute the schedule once over a batch; what `step` and `evaluate` are made of.

        Args:
            inputs, targets: see `step`; without rows nothing is done.
            weight: what a micro-batch's loss is multiplied by before its backward pass, from its rows; None
                for 1.
            train: whether to run backward passes; else the stages are in evaluation mode meanwhile.
            loss: in place of the pipeline's own.
            before_last: called with what is returned before the last backward pass of this rank, where it
                has one chunk: after it the gradients are complete.

        Returns:
            On the last stage's rank the sum of loss times rows over the micro-batches (of losses alone where
            the pipeline's own is a sum), a float64 scalar; on the others 0.
        """
        parts = self._parts(inputs, targets)
        if train:
            require_gradients()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if not parts:
            return total
        passes = StagePasses(
            self.stages,
            self.rank,
            self.ranks,
            self.device,
            inputs.tensor_split(parts),
            targets.tensor_split(parts),
            loss or self.loss,
            total,
            weight,
            by_rows=loss is not None or self.reduction == "mean",
        )
        with nullcontext() if train else evaluating(self.stages):
            plan, kinds = self._plan(parts, train), [(x.shape, x.dtype, train) for x in passes.inputs]
            last = next((e for e in reversed(plan.instructions) if e.kind in COMPLETE), None)
            self._execute(passes, plan, kinds, {last: partial(before_last, total)} if before_last else {})
        return total

    def _parts(self, inputs: Tensor, targets: Tensor) -> int:
        """How many micro-batches a batch has."""
        rows = len(inputs)
        if rows != len(targets):
            raise ValueError(
                f"inputs have {rows} rows and targets {len(targets)}; give one target for each row"
            )
        if self._given is not None and 0 < rows < self.micro_batches:
            raise ValueError(
                f"inputs have {rows} rows and the schedule {self.micro_batches} micro-batches; give at least "
                "a row for each, or name a schedule, which is then made for the rows that there are"
            )
        return min(self.micro_batches, rows)

    def _plan(self, micro_batches: int, train: bool) -> CompletionPlan:
        """What this rank does for so many micro-batches; made when it is first asked for."""
        found = self._plans.get((micro_batches, train))
        if found is None:
            schedule = self._given
            if schedule is None:
                assert self._named is not None
                schedule = schedules.by_name(self._named, self.ranks, micro_batches, len(self.stages))
            if not train:
                schedule = schedules.forward_only(schedule)
            found = CompletionPlan(schedule[self.rank], receipts(schedule)[self.rank])
            self._plans[micro_batches, train] = found
        return found

    def _execute(
        self,
        passes: StagePasses,
        plan: CompletionPlan,
        kinds: Sequence[Hashable],
        before: Mapping[Instruction | None, Callable[[], None]],
    ) -> None:
        messages = self._messages
        messages.begin(plan, kinds)
        try:
            for each in plan.instructions:
                if each in before:
                    before[each]()
                if not self._timed:
                    passes.execute(each, messages)
                    continue
                start = time.perf_counter()
                passes.execute(each, messages)
                event = Event(each, start, time.perf_counter())
                for events in self._timed:
                    events.append(event)
            messages.finish()
        except BaseException:
            messages.drop()
            raise

    @contextmanager
    def timed(self) -> Iterator[list[Event]]:
        """Inside, note when this rank began and ended each instruction, to set beside `schedules.simulate`.

        Yields a list of events in seconds of `time.perf_counter`, which the ranks of a host share. On a GPU
        it is the time in which the work was handed over. Several may be open at once.
        """
        events: list[Event] = []
        self._timed.append(events)
        try:
            yield events
        finally:
            # By identity: two lists of the same events are equal.
            del self._timed[next(i for i, each in enumerate(self._timed) if each is events)]

    @cached_property
    def device(self) -> torch.device:
        """Where this rank computes: where its parameters are."""
        parameters = (p for stage in self.stages for p in stage.parameters())
        return next((p.device for p in parameters), comm.device())

    @cached_property
    def _messages(self) -> StageMessages:
        return StageMessages(self.group, self.rank, self.device)
