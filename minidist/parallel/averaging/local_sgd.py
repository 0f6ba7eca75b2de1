"""Local SGD and DiLoCo: every rank trains by itself, and every k steps the ranks average their parameters.

Data parallelism sends a gradient in each step. Here a rank sends its parameters in every k-th step, so k
times fewer bytes. In between, the copies drift apart, which costs accuracy if k is large. With k = 1, equal
shares and plain SGD it equals data parallelism: the mean of x - lr g over the ranks is x - lr (mean of g).
The same holds for momentum, which is linear in the gradients, but not for Adam.

DiLoCo makes the average a step of an outer optimizer, with anchor - mean as its gradient: the anchor is the
parameters after the last outer step. Plain averaging is outer SGD with rate 1. With Nesterov momentum k can
be large. Streaming DiLoCo synchronizes fragments of the model in turns, and trains on for `delay` steps while
the mean of a fragment is under way.

Sources: Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1; Lin et al. 2020, "Don't
Use Large Mini-Batches, Use Local SGD", section 4, for averaging in every step at first (post-local SGD);
Douillard et al. 2023, "DiLoCo", algorithm 1; Douillard et al. 2025, "Streaming DiLoCo with overlapping
communication", section 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minidist._arguments import check_whole
from minidist.comm.work import Group, rank_in
from minidist.comm.world import DEFAULT_TIMEOUT
from minidist.parallel.averaging.exchanges import AllReduceExchange, CoordinatorExchange
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.flat.joined_messages import MB, broadcast_together, require_same
from minidist.parallel.guards.refusals import require_model

KEPT = 0.5
"""The part of a parameter's own value that stays with a delay (alpha in Streaming DiLoCo)."""


class LocalSGD(nn.Module):
    """A module whose copies on all ranks are averaged every few steps, for a loop that the user writes.

    >>> model = md.LocalSGD(model, every=8)  # DiLoCo: every=50, outer=md.nesterov
    >>> optimizer.zero_grad()
    >>> cross_entropy(model(inputs), targets).backward()
    >>> optimizer.step()
    >>> model.synchronize()

    The constructor broadcasts parameters and buffers from the group's rank 0. Averaging covers the parameters
    that get gradients; the optimizer's state and the buffers stay each rank's own. Memory: one more copy of
    the parameters, in which they are averaged; with `outer` another, and the outer optimizer's state. A
    checkpoint has `model.module`, the optimizer and, if there is one, `model.outer`; a run goes on from one
    that was taken after an outer step. Raises TypeError or ValueError if an argument is wrong, or the ranks'
    modules differ.

    With `coordinator` the workers are no ranks of one world: they may come and go. See `md.Coordinator`.

    Attributes:
        steps, outer_steps: optimizer steps so far, and synchronizations, of one fragment each.
        slot: this worker's index among all, by which it takes its rows: the rank in the group.
        outer: the outer optimizer.

    Args:
        every: k, the steps between two averagings.
        warmup: how many steps at the start each end with a plain average.
        group, bucket_mb, algorithm: the ranks; most megabytes in a message; see `comm.all_reduce`.
        outer: a function from parameters to the outer optimizer, such as `md.nesterov`. None: the average.
        fragments: parts of the model, of about equal bytes, that take turns: each is synchronized every k
            steps, k / fragments steps after the one before. At most k.
        delay: steps from the start of a synchronization to its use, at most k // fragments. Half of a
            parameter's own value then stays.
        coordinator: the address of a `Coordinator`, which has the outer optimizer.
        timeout: seconds that a coordinator may take to answer, beside twice its own timeout, in which it may
            wait for other workers.
    """

    def __init__(
        self,
        module: nn.Module,
        every: int = 8,
        group: Group = None,
        warmup: int = 0,
        bucket_mb: float = 25,
        algorithm: str = "auto",
        *,
        outer: MakeOptimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        coordinator: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}; give a torch.nn.Module")
        if outer is not None:
            require_model(module, outer, "outer")
        check_whole("every", every, 1, ", the steps between two averagings")
        check_whole("warmup", warmup, 0, ", the steps at the start that each end with an averaging")
        check_whole("fragments", fragments, 1)
        check_whole("delay", delay, 0)
        if fragments > every or delay > every // fragments:
            raise ValueError(
                f"every is {every}, fragments {fragments} and delay {delay}: a fragment starts every "
                f"{every / fragments:.3g} steps; use at most {every} fragments, and no longer delay than that"
            )
        self.module, self.every, self.warmup = module, every, warmup
        self.fragments, self.delay = fragments, delay
        self.steps = self.outer_steps = self._begun = 0
        self._left = False
        self.outer: torch.optim.Optimizer | None = None
        self._exchange: AllReduceExchange | CoordinatorExchange
        if coordinator is not None:
            if group is not None or outer is not None or warmup:
                raise ValueError(
                    "group, outer and warmup go without a coordinator, which has the outer optimizer"
                )
            self._exchange = joined = CoordinatorExchange(module, coordinator, fragments, timeout)
            self.slot, self.outer_steps, self._begun = joined.slot, joined.joined_at, joined.joined_at
            self.steps = self._due(self._begun - 1)
            return
        self.slot = rank_in(group)
        state = [*module.named_parameters(), *module.named_buffers()]
        gradient_comm = GradientComm(group, algorithm)
        if gradient_comm.ranks > 1:
            require_same("parameters and buffers", state, group)
        broadcast_together([tensor for _, tensor in state], group)
        limit = int(bucket_mb * MB)
        self._exchange = averaging = AllReduceExchange(module, gradient_comm, limit, fragments, outer)
        self.outer = averaging.outer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for this rank's share of the batch."""
        return self.module(*args, **kwargs)

    def synchronize(self) -> bool:
        """After the optimizer's step: count it, synchronize if it is time, and return whether a value came.

        Each fragment sends 2 (n - 1) / n of its bytes every k steps; see `Coordinator` for the bytes there.
        """
        if self._left:
            raise RuntimeError("synchronize was called after leave(); make LocalSGD anew to join again")
        self.steps += 1
        if self.steps <= self.warmup:
            self.average()
            return True
        before, step = self.outer_steps, self.steps - self.warmup
        if self._begun > before and step >= self._due(before) + self.delay:
            self._finish()
        if step >= self._due(self._begun):
            self._exchange.start(self._begun)
            self._begun += 1
            if not self.delay:
                self._finish()
        return self.outer_steps > before

    def average(self) -> None:
        """Average the parameters now, as at the end of training. Sends 2 (n - 1) / n of their bytes.

        It is a plain average, and no step of the outer optimizer. RuntimeError with a coordinator, whose
        model is the result.
        """
        if not isinstance(self._exchange, AllReduceExchange):
            raise RuntimeError("average was called on a worker of a coordinator; its model has the average")
        if self._begun > self.outer_steps:
            self._finish()
        self._exchange.average()

    def leave(self) -> None:
        """Leave the coordinator, which waits for this worker no longer. Ending the process does the same."""
        if isinstance(self._exchange, CoordinatorExchange):
            self._left = True
            self._exchange.close()

    def _due(self, turn: int) -> int:
        """After how many steps a synchronization starts: fragments in turns, each every k steps."""
        rounds, fragment = divmod(turn, self.fragments)
        return rounds * self.every + (fragment + 1) * self.every // self.fragments

    @torch.no_grad()
    def _finish(self) -> None:
        for parameter, value in self._exchange.finish():
            new = value.to(parameter.device)
            if self.delay:
                parameter.lerp_(new, 1 - KEPT)
            else:
                parameter.copy_(new)
        self.outer_steps += 1
