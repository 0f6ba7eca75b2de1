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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.parallel.compression.sparse_gradients import gather_sparse
from minidist.parallel.flat.gradient_comm import GradientComm, Messages
from minidist.parallel.sharding.gradient_rounds import GradientRounds


class Reducer:
    """Turns the gradients of some parameters into sums over the ranks, multiplied by `scale`.

    Args:
        named: the parameters that get gradients or did, with names; the same on all ranks. gradient_comm: the
        ranks; one is enough. overlap: reduce while backward runs; otherwise at `synchronize`. deal: deals the
        parameters to buckets, at the end of the first round, from their indices in the order in which the
        first backward pass brought their gradients. A collective.

    Attributes:
        syncing: False while gradients only accumulate on this rank.
        waits: whether a backward pass completes its round at its end; otherwise `synchronize` does.
        scale: the factor of this rank's gradients before they are summed.
        totals: this rank's numbers that the next round also sums.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        gradient_comm: GradientComm,
        overlap: bool,
        deal: Callable[[Iterable[int]], GradientRounds],
    ) -> None:
        self.named, self.parameters = named, [parameter for _, parameter in named]
        self.gradient_comm, self.overlap, self._deal = gradient_comm, overlap, deal
        self.rounds: GradientRounds | None = None
        self.syncing, self.waits, self.scale = True, True, 1 / gradient_comm.ranks
        self.totals: Sequence[float | Tensor] = ()
        self._order: dict[int, None] = {}  # parameter indices, as the first backward pass brings them
        self._reduced = False  # a backward pass has completed a round since the last `synchronize`
        self._local = self._step_is_early = False  # gradients came that no round has summed; wait for one
        self._open, self._completing = False, False  # a round is under way; it is past its backward pass
        self._next = 0  # the bucket to be sent next
        self._ready = bytearray(len(self.parameters))  # whose gradient lies in its bucket, scaled
        self._came = bytearray(len(self.parameters))  # 1: of rows that count; 2: of padding; 3: of both
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
        rounds = self.rounds
        if rounds is None:
            self._order.setdefault(param_index)
            return
        if not reducing:  # the gradient waits in its bucket for a later round
            if rounds.in_buckets:
                rounds.place(param_index, 1.0)
            return
        if self._ready[param_index]:
            raise RuntimeError(
                f"the gradient of {self.named[param_index][0]} came twice in one backward pass, as where a "
                "checkpointed part runs a backward pass of its own; checkpoint with use_reentrant=False"
            )
        rounds.place(param_index, self.scale)
        self._ready[param_index] = True
        self._waiting[rounds.bucket_of[param_index]] -= 1
        while self._next < len(rounds.buckets) and not self._waiting[self._next]:
            self._reduce_next(rounds)

    def _reduce_next(self, rounds: GradientRounds) -> None:
        """Reduce the next bucket, which is complete."""
        bucket, over = rounds.buckets[self._next], self.gradient_comm
        self._next += 1
        last = self._next == len(rounds.buckets)
        if rounds.tail_in_bucket and last:
            self._fill_tail(rounds)
        if over.hybrid is not None and self._running and not over.meets:
            self._running[-1].advance()  # the sum over copies of the bucket before
        self._running.append(bucket.reduce(blocking=self._completing or last))

    def _fill_tail(self, rounds: GradientRounds) -> None:
        for index in (index for index, came in enumerate(self._came) if came == 2):
            self._unused.append(index)
            if (grad := self.parameters[index].grad) is not None and grad.is_sparse:
                self.parameters[index].grad = None  # no optimizer may see its rows
        rounds.fill_tail(self._unused, self.totals)

    # The end of backward, or `synchronize`, completes the round: launch the rest, wait.

    def _backward_ended(self) -> None:
        self.synchronize()
        self._reduced = True

    @property
    def pending(self) -> bool:
        """Whether gradients came since the last `synchronize`."""
        return self._open or self._local or self._reduced

    def synchronize(self) -> GradientRounds:
        """Make sure that a round has summed the gradients that came since the last call.

        A rank that has no gradients takes part too.
        """
        rounds, is_done = self.settled(), self._reduced and not (self._open or self._local)
        self._reduced = False
        if is_done:
            return rounds

        # Launch what the backward pass has not, bucket by bucket, so that few are full at once.
        self._completing = True
        missing: list[list[int]] = [[] for _ in (*rounds.buckets, None)]  # the last: of no bucket
        for index, ready in enumerate(self._ready):
            if not ready:
                missing[rounds.bucket_of[index]].append(index)
        for number, indices in enumerate(missing):
            for index in indices:
                self._fill_missing(rounds, index)
            if number == self._next < len(rounds.buckets):
                self._reduce_next(rounds)
        if not rounds.tail_in_bucket:
            self._fill_tail(rounds)
            self._running.append(rounds.send_tail())
        if rounds.sparse:
            self._running.append(Messages(gather_sparse(self.gradient_comm, rounds.sparse, self.scale)))

        # Wait. A reduction of several messages sends its next one as soon as the last is complete.
        while self._running:
            for messages in self._running:
                messages.advance()
            self._running = [messages for messages in self._running if messages.message is not None]

        rounds.summed(self._unused)
        self.totals, self.waits, self._next = (), True, 0
        self._local = self._step_is_early = self._open = self._completing = False
        self._ready, self._came = bytearray(len(self.parameters)), bytearray(len(self.parameters))
        self._waiting, self._unused = [*self._expected], []
        return rounds

    def settled(self) -> GradientRounds:
        """The rounds. The first call deals the parameters to buckets, which is a collective."""
        if self.rounds is None:
            self.rounds = self._deal(self._order)
            self._expected = self.rounds.waiting()
            self._waiting = [*self._expected]
        return self.rounds

    def _fill_missing(self, rounds: GradientRounds, param_index: int) -> None:
        """Use the gradient from an earlier backward pass when the running one did not produce any."""
        if self.parameters[param_index].grad is not None:
            rounds.place(param_index, self.scale)
            return
        self._unused.append(param_index)
        if (view := rounds.view(param_index)) is not None:
            view.zero_()

    def recover(self) -> None:
        """After a backward pass that raised: complete its round, since other ranks may wait, and drop it."""
        if self._open:
            self.synchronize().clear()


def _hook(owner: weakref.ref[Reducer], param_index: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        if (reducer := owner()) is not None:
            reducer.arrived(param_index)

    return arrived


def _before_step(owner: weakref.ref[Reducer]) -> Callable[..., None]:
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
