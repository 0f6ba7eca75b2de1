"""The reducer: sums gradients over the ranks, bucket by bucket, while the backward pass still computes.

A hook on each parameter moves its gradient into a bucket as soon as autograd has accumulated it. A bucket
whose gradients are all there is sent at once, behind those before it; the end of the backward pass sends the
rest and waits. That is a round: every rank sends every bucket once, in the same order, whichever parameters
it used. It also counts for each parameter the ranks that used it.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", sections
3.2.3 and 4.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.parallel.compression.sparse_gradients import gather_sparse
from minidist.parallel.flat.buckets import GradientComm, PendingMessage
from minidist.parallel.sharding.bucket_assignment import RoundPlan

AnyPlan = TypeVar("AnyPlan", bound=RoundPlan)


class Reducer(Generic[AnyPlan]):
    """The gradients of `parameters` become sums over the ranks, multiplied by `scale`.

    Args:
        named: the parameters that get gradients, with their names; the same on all ranks. One that has been
            frozen since may be among them.
        exchange: the ranks, at least two.
        overlap: reduce while backward runs; else at `synchronize`.
        make_plan: given the places of parameters in the order in which the first backward pass brought their
            gradients, the plan of all rounds; called by all ranks at the end of the first.

    Attributes:
        syncing: False while gradients only accumulate on this rank.
        waits: whether a backward pass completes its round at its end; else `synchronize` does.
        scale: what this rank's gradients are multiplied by before they are summed.
        totals: numbers of this rank, to be summed with the next round; as many as the plan has room for.
        sums: the last round's.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        exchange: GradientComm,
        overlap: bool,
        make_plan: Callable[[Iterable[int]], AnyPlan],
    ) -> None:
        self.named, self.parameters = named, [parameter for _, parameter in named]
        self.exchange, self.overlap = exchange, overlap
        self._make_plan = make_plan
        self.syncing, self.waits, self.scale = True, True, 1 / exchange.ranks
        self.totals: Sequence[float | Tensor] = ()
        self.sums = torch.zeros(2)
        self.plan: AnyPlan | None = None
        self._order: dict[int, None] = {}  # places, as the first backward pass brings them
        self._reduced = False  # a backward pass has completed a round since the last `synchronize`
        self._local = False  # gradients came that no round has summed
        self._reminder: Any = None
        self._open, self._completing = False, False  # a round is under way; it is past its backward pass
        self._next = 0  # the bucket to be sent next
        self._ready = bytearray(len(self.parameters))  # whose gradient lies in its bucket, scaled
        self._waiting: list[int] = []  # for each bucket, gradients that it lacks
        self._unused: list[int] = []  # places without a gradient on this rank
        self._running: list[
            tuple[PendingMessage, Iterator[PendingMessage]]
        ] = []  # messages under way, and what follows each
        itself = weakref.ref(self)  # the parameters outlive the wrapper; it must not live on in their hooks
        hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(itself, place))  # type: ignore[no-untyped-call]
            for place, parameter in enumerate(self.parameters)
            if parameter.requires_grad
        ]
        self._removal = weakref.finalize(self, _remove, hooks)
        self._removal.atexit = False

    def detach(self) -> None:
        """Take the hooks off the parameters; their gradients stay as they are."""
        self._removal()
        self._forget_reminder()

    # Backward: gradients come, and complete buckets go.

    def arrived(self, place: int) -> None:
        """Autograd has accumulated the gradient of a parameter."""
        reducing = self.syncing and self.overlap
        if not reducing:
            self._local = True
            if self.syncing and self._reminder is None:
                self._reminder = register_optimizer_step_pre_hook(_reminder(weakref.ref(self)))
        elif not self._open:
            self._open = True
            if self.waits:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._backward_ended)
        plan = self.plan
        if plan is None:
            self._order.setdefault(place)
            return
        if not reducing:
            if plan.collects:
                self._move(plan, place, 1.0)
            return
        if self._ready[place]:
            raise RuntimeError(
                f"the gradient of {self.named[place][0]} came twice in one backward pass, as it does where a "
                "checkpointed part runs a backward pass of its own; checkpoint with use_reentrant=False"
            )
        self._move(plan, place, self.scale)
        self._ready[place] = True
        number = plan.bucket_of[place]
        self._waiting[number] -= 1
        if number == self._next and not self._waiting[number]:
            self._launch(plan)
            while self._next < len(plan.reductions) and not self._waiting[self._next]:
                self._launch(plan)

    def _move(self, plan: AnyPlan, place: int, scale: float) -> None:
        """Have a parameter's gradient lie in its bucket, multiplied by `scale`; sparse ones stay."""
        parameter, view = self.parameters[place], plan.view(place)
        grad = parameter.grad
        if view is None or grad is None:
            return
        if grad is view:
            if scale != 1:
                view.mul_(scale)
            return
        if grad.requires_grad:  # of backward(create_graph=True)
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        if scale != 1:
            torch.mul(grad, scale, out=view)  # one pass, and not one to copy and one to divide
        else:
            view.copy_(grad)
        plan.moved(parameter, view)

    def _launch(self, plan: AnyPlan) -> None:
        """Start the reduction of the next bucket."""
        self.exchange.nothing_left = self._completing or self._next == len(plan.reductions) - 1
        if plan.tail_in_bucket and self._next == len(plan.reductions) - 1:
            self._fill_tail(plan)
        self._start(plan.reductions[self._next].run())
        self._next += 1

    def _start(self, steps: Iterator[PendingMessage]) -> None:
        first = next(steps, None)
        if first is not None:
            self._running.append((first, steps))

    def _fill_tail(self, plan: AnyPlan) -> None:
        plan.tail.fill_(1.0)
        for place in self._unused:
            plan.tail[place] = 0.0
        for number in range(len(self.parameters), len(plan.tail)):
            plan.tail[number] = 0.0
        for number, total in enumerate(self.totals, len(self.parameters)):
            plan.tail[number] = total

    def _backward_ended(self) -> None:
        self.reduce()
        self._reduced = True

    @property
    def pending(self) -> bool:
        """Gradients came since the last `synchronize`."""
        return self._open or self._local or self._reduced

    # The round is completed: launch the rest, wait.

    def synchronize(self) -> None:
        """Make sure that a round has summed the gradients that came since the last call."""
        if self._open or self._local or not self._reduced:
            self.reduce()
        self._reduced = False

    def reduce(self) -> None:
        """Complete a round, also where this rank has no gradient to give."""
        self._forget_reminder()
        plan = self.settled()

        # Launch what the backward pass has not, bucket by bucket, so that few are full at once.
        self._completing = True
        missing: list[list[int]] = [[] for _ in (*plan.reductions, None)]  # the last: of no bucket
        for place, ready in enumerate(self._ready):
            if not ready:
                missing[plan.bucket_of[place]].append(place)
        for number, places in enumerate(missing[:-1]):
            for place in places:
                self._complete(plan, place)
            if number == self._next:
                self._launch(plan)
        for place in missing[-1]:
            self._complete(plan, place)
        self.exchange.nothing_left = True
        if not plan.tail_in_bucket:
            self._fill_tail(plan)
            self._start(iter([self.exchange.all_reduce(plan.tail)]))
        if plan.sparse:
            self._start(gather_sparse(self.exchange, plan.sparse, self.scale))

        # Wait. A reduction of several messages sends its next one as soon as the last is complete.
        while self._running:
            running, self._running = self._running, []
            for work, steps in running:
                work.wait()
                self._start(steps)

        plan.summed(self._unused)
        self.sums, self.totals = plan.tail[len(self.parameters) :], ()
        self._local = False
        self._reset(plan)

    def settled(self) -> AnyPlan:
        """The plan, which is made where there is none yet: a collective then."""
        if self.plan is None:
            self.plan = self._make_plan(self._order)
            self._waiting = self.plan.waiting()
        return self.plan

    def _complete(self, plan: AnyPlan, place: int) -> None:
        """Take what there is of a gradient that the running backward pass has not brought."""
        if self.parameters[place].grad is not None:
            self._move(plan, place, self.scale)
            return
        view = plan.view(place)
        self._unused.append(place)
        if view is not None:
            view.zero_()

    def _reset(self, plan: AnyPlan) -> None:
        """Before the next round."""
        self.waits = True
        self._open, self._completing, self._next = False, False, 0
        self._ready = bytearray(len(self.parameters))
        self._waiting, self._unused = plan.waiting(), []

    def recover(self) -> None:
        """After a backward pass that raised: complete its round, which others may wait for, and drop it."""
        if self._open:
            self.reduce()
            self._reduced = False
            if self.plan is not None:
                self.plan.clear()

    def _forget_reminder(self) -> None:
        if self._reminder is not None:
            self._reminder.remove()
            self._reminder = None


def _hook(owner: weakref.ref[Reducer[Any]], place: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        reducer = owner()
        if reducer is not None:
            reducer.arrived(place)

    return arrived


def _reminder(owner: weakref.ref[Reducer[Any]]) -> Callable[..., None]:
    """Before an optimizer's step: an error where it would use gradients of this rank alone."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        reducer = owner()
        own = {id(parameter) for parameter in reducer.parameters} if reducer is not None else set()
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "the optimizer was to step on gradients of this rank alone; call the DataParallel's "
                "synchronize() after backward() and before step()"
            )

    return check


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
