"""The optimizer of flat shards, and what has to happen around its step.

The gradients of shards are complete only once all ranks know which parameters were used. And in half
precision, units are gathered from rounded copies of what the optimizer updates. A loop may call the
optimizer's own `step` and `zero_grad`, so hooks on them do both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.unit_hooks import weakly
from minidist.parallel.sharding.unit_runtime import UnitRuntime
from minidist.parallel.training.clipping import guard


class OptimizerWrapper:
    """Steps the optimizer of `slices`; the optimizer's own step and zero_grad call it.

    hidden: the module's parameters, which get no gradients.
    """

    def __init__(
        self, slices: OptimizerSlices, runtime: UnitRuntime, group: Group, hidden: Iterable[Tensor]
    ) -> None:
        self.slices, self.runtime, self._group = slices, runtime, group
        optimizer = slices.optimizer
        self._stepping = False  # the optimizer's step is called from here
        optimizer.register_step_pre_hook(weakly(self._before_step))
        optimizer.register_step_post_hook(weakly(self._after_step))
        optimizer.zero_grad = weakly(self.zero_grad)  # type: ignore[method-assign]
        slices.guarded_by(weakly(self._why_not_clipped))
        guard(hidden, weakly(self._why_hidden))

    def _before_step(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RuntimeError("an optimizer of shards takes no closure; run it, and call step() after it")
        if self.slices.memory.longest is not None:
            raise RuntimeError(
                "the optimizer's state lies on disk, and its own step() would bring all of it to memory; "
                "call the FullyShard's step()"
            )
        self.complete()

    def _after_step(self, *_: Any) -> None:
        if not self._stepping:
            self.publish()

    def _why_not_clipped(self, whole: bool) -> str | None:
        """Why `clip_grad_norm` must not shorten the pieces' gradients; whole: as if this rank had all."""
        if not self.runtime.gradients.synchronized:
            return "parameters has shards of a FullyShard, whose gradients are not complete"
        return "parameters has shards of a FullyShard, and sharded is False" if whole else None

    def _why_hidden(self, whole: bool) -> str:
        return "parameters has a module's inside a FullyShard, which get no gradients"

    def step(self) -> None:
        """Complete the gradients, update this rank's shards and publish them."""
        self.complete()
        self._stepping = True
        try:
            self.slices.step()
        finally:
            self._stepping = False
        self.runtime.changed()

    def synchronize(self, totals: Sequence[float | Tensor]) -> list[float]:
        """Complete the gradients; see `FullyShard.synchronize`."""
        self.runtime.finish()
        gradients, device = self.runtime.gradients, self.runtime.root.device
        used = [*map(float, gradients.used), *totals, *(0.0,) * (2 - len(totals))]
        counts = torch.tensor(used, dtype=torch.float64, device=device)
        counted: list[float] = comm.all_reduce(counts, group=self._group).tolist()
        self.slices.give_gradients(counted[:-2])
        gradients.synchronized = True
        return counted[-2:]

    def complete(self) -> None:
        """Complete the gradients, unless no backward pass has come since they were."""
        if not self.runtime.gradients.synchronized:
            self.synchronize(())

    def publish(self) -> None:
        """After a step: have the next pass gather what the optimizer has updated."""
        self.slices.round_masters()
        self.runtime.changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.runtime.gradients.forget()
        self.slices.drop_gradients()
