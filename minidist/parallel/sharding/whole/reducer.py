"""The reducer: sums gradients over the ranks, bucket by bucket, while the backward pass still computes.

A hook on each parameter moves its gradient into a bucket as soon as autograd has accumulated it. A full
bucket is sent at once, after those before it; the end of the backward pass sends the rest and waits. That is
a round: every rank sends every bucket once, in the same order, whichever parameters it used, and for each
parameter the ranks that used it are counted.

| Event | What follows |
|---|---|
| a gradient has arrived | it goes to its bucket (`arrived`) |
| a bucket's last one has | the bucket is reduced, after those before it (`_reduce_next`) |
| the backward pass has ended | the round is finished (`finish_round`), unless `expect` said otherwise |
| `finish_round` is called | the same, if gradients have come that no round has summed |
| an optimizer steps | an error, if gradients wait that `finish_round` should have summed |
| the backward pass has raised | the next pass finishes the round, since other ranks may wait (`recover`) |

Source: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), sections 3.2.3 and 4.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.parallel.compression.sparse_gradients import gather_sparse
from minidist.parallel.flat.gradients import Gradients, Messages
from minidist.parallel.sharding.optimizer.parameter_groups import steps_on
from minidist.parallel.sharding.sets.parameter_set import ParameterSet, Totals
from minidist.parallel.sharding.whole.dealing import Dealer

OF_ROWS, OF_PADDING = 1, 2
"""Bits: a pass over rows that count brought a gradient; one over padding did. A parameter may have both."""


class Came(Enum):
    """What has come since the last `finish_round`. A gradient moves this on, and so does the end of backward.

    `finish_round` sums what was KEPT or is UNSENT, ends the round that is SENDING, and leaves FINISHED ones.
    """

    NOTHING = "no gradient"
    KEPT = "gradients that add up on this rank, as they should: not `syncing`"
    UNSENT = "gradients that wait for `finish_round`, without `overlap`; a step on them would come too early"
    SENDING = "gradients that a backward pass sends as buckets become full"
    FINISHED = "gradients that a backward pass has sent and summed"


class Reducer:
    """Turns the gradients of a model's sets of parameters into sums over the ranks.

    The buckets of all sets are sent in one order, which is the same on all ranks, so that no two ranks wait
    for each other in different groups.

    Args:
        dealer: has the parameters by index, and deals them to buckets at the end of the first round.
        overlap: reduce while backward runs; otherwise in `finish_round`.

    Attributes:
        syncing: False while gradients only accumulate on this rank.
        queue: the gradients of each bucket, as they are sent; None before the first round.
    """

    def __init__(self, dealer: Dealer, overlap: bool) -> None:
        self._dealer, self.sets, self.overlap = dealer, dealer.sets, overlap
        self.parameters = [*dealer.parameters]
        self.queue: list[tuple[ParameterSet, Gradients]] | None = None
        self.syncing = True
        self._order: dict[int, None] = {}  # parameter indices, as the first backward pass brings them
        self._set_of = {index: param_set for param_set in self.sets for index in param_set.indices}
        self._bucket_of: dict[int, int] = {}  # the number of each one's bucket; len(queue) for none
        self._expected: list[int] = []  # for each bucket, and last for none, its gradients in a round
        self._running: list[Messages] = []
        self._begin_round()
        itself = weakref.ref(self)  # the parameters outlive the wrapper; it must not live on in their hooks
        hooks: list[Any] = [
            self.parameters[index].register_post_accumulate_grad_hook(_hook(itself, index))  # type: ignore[no-untyped-call]
            for index in self._set_of
            if self.parameters[index].requires_grad
        ]
        hooks.append(register_optimizer_step_pre_hook(_before_step(itself)))
        self._removal = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self._removal.atexit = False

    def _begin_round(self) -> None:
        """Set what holds for one round only."""
        self._totals, self._ends_with_backward = Totals(), True  # see `expect`
        self._came = Came.NOTHING
        self._next = 0  # the bucket to be sent next
        self._lacking = [*self._expected]  # for each bucket, and last for none, the gradients that it lacks
        self._ready = bytearray(len(self.parameters))  # whose gradient lies in its bucket, scaled
        self._brought_by = bytearray(len(self.parameters))  # OF_ROWS, OF_PADDING, both, or neither

    def detach(self) -> None:
        """Take the hooks off the parameters; their gradients stay as they are."""
        self._removal()

    def expect(self, totals: Totals, waits: bool = True) -> None:
        """Have the next round also sum `totals`. waits: whether a backward pass finishes it at its end."""
        self._totals, self._ends_with_backward = totals, waits

    # Backward: gradients come, and complete buckets go.

    def arrived(self, param_index: int) -> None:
        """React to a gradient that autograd has accumulated."""
        param_set, parameter = self._set_of[param_index], self.parameters[param_index]
        self._brought_by[param_index] |= OF_ROWS if param_set.pass_has_rows else OF_PADDING
        reducing = self.syncing and self.overlap
        if not reducing:
            if self._came not in (Came.UNSENT, Came.SENDING):
                self._came = Came.UNSENT if self.syncing else Came.KEPT
        elif self._came is not Came.SENDING:
            self._came = Came.SENDING
            if self._ends_with_backward:
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        if self.queue is None:
            self._order.setdefault(param_index)
            return
        if not reducing:  # the gradient waits in its bucket for a later round
            if param_set.stay_in_buckets:
                param_set.place(param_index, parameter, 1.0)
            return
        if self._ready[param_index]:
            raise RuntimeError(
                f"the gradient of {self._dealer.name_of(param_index)} came twice in one backward pass, as "
                "where a checkpointed part runs a backward pass of its own; checkpoint with "
                "use_reentrant=False"
            )
        param_set.place(param_index, parameter, param_set.scale)
        self._ready[param_index] = True
        self._lacking[self._bucket_of[param_index]] -= 1
        while self._next < len(self.queue) and not self._lacking[self._next]:
            self._reduce_next(self.queue, blocking=False)

    def _reduce_next(self, queue: Sequence[tuple[ParameterSet, Gradients]], blocking: bool) -> None:
        """Reduce the next bucket, which is complete. blocking: nothing is left to compute meanwhile."""
        param_set, gradients = queue[self._next]
        self._next += 1
        if param_set.tail_in_bucket and gradients is param_set.gradients[-1]:
            self._fill_tail(param_set)
        over = param_set.gradient_comm
        if over.hybrid is not None and self._running and not over.waits_in_backward:
            self._running[-1].advance()  # the sum over copies of the bucket before
        self._running.append(gradients.reduce(blocking=blocking or self._next == len(queue)))

    def _fill_tail(self, param_set: ParameterSet) -> None:
        for index in param_set.indices:
            if self._brought_by[index] == OF_PADDING:
                param_set.unused.append(index)
                if (grad := self.parameters[index].grad) is not None and grad.is_sparse:
                    self.parameters[index].grad = None  # no optimizer may see its rows
        param_set.fill_tail(self._totals)

    # The end of backward, or a call, finishes the round: launch the rest, wait.

    def _backward_ended(self) -> None:
        self.finish_round()
        self._came = Came.FINISHED

    @property
    def pending(self) -> bool:
        """Whether gradients came since the last `finish_round`."""
        return self._came is not Came.NOTHING

    @property
    def steps_too_early(self) -> bool:
        """Whether an optimizer would step on gradients of this rank alone."""
        return self._came is Came.UNSENT

    def finish_round(self) -> None:
        """Make sure that a round has summed the gradients that came since the last call.

        A rank that has no gradients takes part too.
        """
        queue = self.settle()
        if self._came is Came.FINISHED:
            self._came = Came.NOTHING
            return

        # Launch what the backward pass has not, bucket by bucket, so that few are full at once.
        missing: list[list[int]] = [[] for _ in (*queue, None)]  # the last: of no bucket
        for index, number in self._bucket_of.items():
            if not self._ready[index]:
                missing[number].append(index)
        for number, indices in enumerate(missing):
            for index in indices:
                self._fill_missing(index)
            if number == self._next < len(queue):
                self._reduce_next(queue, blocking=True)
        for param_set in self.sets:
            if not param_set.tail_in_bucket:
                self._fill_tail(param_set)
                self._running.append(param_set.send_tail())
            if param_set.sparse:
                self._running.append(
                    Messages(gather_sparse(param_set.gradient_comm, param_set.sparse, param_set.scale))
                )

        # Wait. A reduction of several messages sends its next one as soon as the last is complete.
        while self._running:
            for messages in self._running:
                messages.advance()
            self._running = [messages for messages in self._running if messages.message is not None]

        for param_set in self.sets:
            param_set.summed(self.parameters)
        self._begin_round()

    def settle(self) -> list[tuple[ParameterSet, Gradients]]:
        """The queue. The first call deals the parameters to them, which is a collective."""
        if self.queue is None:
            self.queue = self._dealer.first_round(self._order)
            no_bucket = len(self.queue)
            self._bucket_of = dict.fromkeys(self._set_of, no_bucket)
            last: dict[int, int] = {}  # for each set; its sparse gradients wait for this bucket
            for number, (param_set, gradients) in enumerate(self.queue):
                self._bucket_of |= dict.fromkeys(gradients.layout.param_indices, number)
                last[id(param_set)] = number
            for index, param_set in self._set_of.items():
                if self._bucket_of[index] == no_bucket:
                    self._bucket_of[index] = last.get(id(param_set), no_bucket)
            self._expected = [0] * (no_bucket + 1)
            for number in self._bucket_of.values():
                self._expected[number] += 1
            self._lacking = [*self._expected]
        return self.queue

    def _fill_missing(self, param_index: int) -> None:
        """Use the gradient from an earlier backward pass when the running one did not produce any."""
        param_set, parameter = self._set_of[param_index], self.parameters[param_index]
        if parameter.grad is not None:
            param_set.place(param_index, parameter, param_set.scale)
            return
        param_set.unused.append(param_index)
        if (view := param_set.view(param_index)) is not None:
            view.zero_()

    def recover(self) -> None:
        """After a backward pass that raised: finish its round, since other ranks may wait, and drop it."""
        if self._came is Came.SENDING:
            self.finish_round()
            for param_set in self.sets:
                param_set.clear()


def _hook(owner: weakref.ref[Reducer], param_index: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        if (reducer := owner()) is not None:
            reducer.arrived(param_index)

    return arrived


def _before_step(owner: weakref.ref[Reducer]) -> Callable[..., None]:
    """A hook that raises before an optimizer steps on gradients of this rank alone."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        reducer = owner()
        if reducer is not None and reducer.steps_too_early and steps_on(optimizer, reducer.parameters):
            raise RuntimeError(
                "the optimizer was to step on gradients of this rank alone; call the DataParallel's "
                "synchronize() after backward() and before step()"
            )

    return check
