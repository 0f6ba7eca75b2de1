"""The reducer: sums gradients over the ranks, bucket by bucket, while the backward pass still computes.

A hook on each parameter moves its gradient into a bucket as soon as autograd has accumulated it. A full
bucket is sent at once, after those before it; the end of the backward pass sends the rest and waits. That is
a round: every rank sends every bucket once, in the same order, whichever parameters it used, and for each
parameter the ranks that used it are counted.

Source: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), sections 3.2.3 and 4.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.parallel.compression.sparse_gradients import gather_sparse
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm, Messages
from minidist.parallel.sharding.bucket_assignment import GradientAssignment

AnyAssignment = TypeVar("AnyAssignment", bound=GradientAssignment)


class Reducer(Generic[AnyAssignment]):
    """Turns the gradients of some parameters into sums over the ranks, multiplied by `scale`.

    Args:
        named: the parameters that get gradients or did, with names; the same on all ranks.
        gradient_comm: the ranks; one is enough.
        overlap: reduce while backward runs; otherwise at `synchronize`.
        assign: makes the assignment of all rounds, at the end of the first, from parameter indices in the
            order in which the first backward pass brought their gradients. A collective.

    Attributes:
        syncing: False while gradients only accumulate on this rank.
        waits: whether a backward pass completes its round at its end; otherwise `synchronize` does.
        scale: the factor of this rank's gradients before they are summed.
        totals, sums: this rank's numbers that the next round also sums; their sums in the last round.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        gradient_comm: GradientComm,
        overlap: bool,
        assign: Callable[[Iterable[int]], AnyAssignment],
    ) -> None:
        self.named, self.parameters = named, [parameter for _, parameter in named]
        self.gradient_comm, self.overlap, self._assign = gradient_comm, overlap, assign
        self.assignment: AnyAssignment | None = None
        self.syncing, self.waits, self.scale = True, True, 1 / gradient_comm.ranks
        self.totals: Sequence[float | Tensor] = ()
        self.sums = torch.zeros(2)
        self._order: dict[int, None] = {}  # parameter indices, as the first backward pass brings them
        self._reduced = False  # a backward pass has completed a round since the last `synchronize`
        self._local = self._step_is_early = False  # gradients came that no round has summed; wait for one
        self._open, self._completing = False, False  # a round is under way; it is past its backward pass
        self._next = 0  # the bucket to be sent next
        self._ready = bytearray(len(self.parameters))  # whose gradient lies in its bucket, scaled
        self._came = bytearray(len(self.parameters))  # whose gradient is of rows that count, 1, of others, 2
        self._waiting: list[int] = []  # for each bucket, the gradients that it lacks
        self._expected: list[int] = []  # the same before a round
        self._unused: list[int] = []  # indices of parameters without a gradient on this rank
        self._running: list[Messages] = []
        itself = weakref.ref(self)  # the parameters outlive the wrapper; it must not live on in their hooks
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(_hook(itself, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
            if parameter.requires_grad
        ]
        hooks.append(register_optimizer_step_pre_hook(_before_step(itself)))
        self._removal = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self._removal.atexit = False

    def detach(self) -> None:
        """Take the hooks off the parameters; their gradients stay as they are."""
        self._removal()

    # Backward: gradients come, and complete buckets go.

    def arrived(self, param_index: int) -> None:
        """React to a gradient that autograd has accumulated."""
        self._came[param_index] |= 1 if self.gradient_comm.counts else 2
        reducing = self.syncing and self.overlap
        if not reducing:
            self._local = True
            self._step_is_early |= self.syncing
        elif not self._open:
            self._open = True
            if self.waits:
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        assignment = self.assignment
        if assignment is None:
            self._order.setdefault(param_index)
            return
        if not reducing:  # the gradient waits in its bucket for a later round
            if assignment.collects:
                self._move(assignment, param_index, 1.0)
            return
        if self._ready[param_index]:
            raise RuntimeError(
                f"the gradient of {self.named[param_index][0]} came twice in one backward pass, as where a "
                "checkpointed part runs a backward pass of its own; checkpoint with use_reentrant=False"
            )
        self._move(assignment, param_index, self.scale)
        self._ready[param_index] = True
        self._waiting[assignment.bucket_of[param_index]] -= 1
        while self._next < len(assignment.buckets) and not self._waiting[self._next]:
            self._running.append(self._next_bucket(assignment).reduce())

    def _move(self, assignment: AnyAssignment, param_index: int, scale: float) -> None:
        """Have a parameter's gradient lie in its bucket, multiplied by `scale`; sparse gradients stay."""
        parameter, view = self.parameters[param_index], assignment.view(param_index)
        grad = parameter.grad
        if view is None or grad is None:
            return
        if grad.requires_grad:  # of backward(create_graph=True)
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        if scale != 1:
            torch.mul(grad, scale, out=view)  # one pass instead of one to copy and one to divide
        elif grad is not view:
            view.copy_(grad)
        if grad is not view:
            assignment.moved(parameter, view)

    def _next_bucket(self, assignment: AnyAssignment) -> Bucket:
        """The bucket that is sent next, complete."""
        self._next += 1
        last, over = self._next == len(assignment.buckets), self.gradient_comm
        over.blocking = self._completing or last
        if assignment.tail_in_bucket and last:
            self._fill_tail(assignment)
        if over.hybrid is not None and self._running and not over.meets:
            self._running[-1].advance()  # the sum over copies of the bucket before
        return assignment.buckets[self._next - 1]

    def _fill_tail(self, assignment: AnyAssignment) -> None:
        for index in (index for index, came in enumerate(self._came) if came == 2):
            self._unused.append(index)
            if (grad := self.parameters[index].grad) is not None and grad.is_sparse:
                self.parameters[index].grad = None  # no optimizer may see its rows
        assignment.fill_tail(self._unused, self.totals)

    # The end of backward, or `synchronize`, completes the round: launch the rest, wait.

    def _backward_ended(self) -> None:
        self.synchronize()
        self._reduced = True

    @property
    def pending(self) -> bool:
        """Whether gradients came since the last `synchronize`."""
        return self._open or self._local or self._reduced

    def synchronize(self) -> AnyAssignment:
        """Make sure that a round has summed the gradients that came since the last call.

        A rank that has no gradients takes part too.
        """
        assignment, is_done = self.settled(), self._reduced and not (self._open or self._local)
        self._reduced = False
        if is_done:
            return assignment

        # Launch what the backward pass has not, bucket by bucket, so that few are full at once.
        self._completing = True
        missing: list[list[int]] = [[] for _ in (*assignment.buckets, None)]  # the last: of no bucket
        for index, ready in enumerate(self._ready):
            if not ready:
                missing[assignment.bucket_of[index]].append(index)
        for number, indices in enumerate(missing):
            for index in indices:
                self._complete(assignment, index)
            if number == self._next < len(assignment.buckets):
                self._running.append(self._next_bucket(assignment).reduce())
        self.gradient_comm.blocking = True
        if not assignment.tail_in_bucket:
            self._fill_tail(assignment)
            self._running.append(Messages(iter([self.gradient_comm.all_reduce(assignment.tail)])))
        if assignment.sparse:
            self._running.append(Messages(gather_sparse(self.gradient_comm, assignment.sparse, self.scale)))

        # Wait. A reduction of several messages sends its next one as soon as the last is complete.
        while self._running:
            for messages in self._running:
                messages.advance()
            self._running = [messages for messages in self._running if messages.message is not None]

        assignment.summed(self._unused)
        self.sums, self.totals = assignment.tail[len(self.parameters) :], ()
        self.waits, self._next = True, 0
        self._local = self._step_is_early = self._open = self._completing = False
        self._ready, self._came = bytearray(len(self.parameters)), bytearray(len(self.parameters))
        self._waiting, self._unused = [*self._expected], []
        return assignment

    def settled(self) -> AnyAssignment:
        """The assignment. The first call makes it, which is a collective."""
        if self.assignment is None:
            self.assignment = self._assign(self._order)
            self._expected = self.assignment.waiting()
            self._waiting = [*self._expected]
        return self.assignment

    def _complete(self, assignment: AnyAssignment, param_index: int) -> None:
        """Use the gradient from an earlier backward pass when the running one did not produce any."""
        if self.parameters[param_index].grad is not None:
            self._move(assignment, param_index, self.scale)
            return
        self._unused.append(param_index)
        if (view := assignment.view(param_index)) is not None:
            view.zero_()

    def recover(self) -> None:
        """After a backward pass that raised: complete its round, since other ranks may wait, and drop it."""
        if self._open:
            self.synchronize().clear()


def _hook(owner: weakref.ref[Reducer[Any]], param_index: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        if (reducer := owner()) is not None:
            reducer.arrived(param_index)

    return arrived


def _before_step(owner: weakref.ref[Reducer[Any]]) -> Callable[..., None]:
    """A hook that raises before an optimizer steps on gradients of this rank alone."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        reducer = owner()
        if reducer is None or not reducer._step_is_early:
            return
        own = {id(parameter) for parameter in reducer.parameters}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "the optimizer was to step on gradients of this rank alone; call the DataParallel's "
                "synchronize() after backward() and before step()"
            )

    return check
