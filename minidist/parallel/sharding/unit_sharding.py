"""Stage 3 around its units: reduce their gradients, update this rank's shards, publish them to the next pass.

The gradients of shards are complete only once all ranks know which parameters were used. And in half
precision, units are gathered from rounded copies of what the optimizer updates. A loop may call the
optimizer's own `step` and `zero_grad`, so hooks on them do both.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm import work
from minidist.comm.errors import CollectiveError
from minidist.parallel.contract.engine import requires_closure
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm, Messages
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.parameter_groups import FlatParameterGroups
from minidist.parallel.sharding.reduce_to_owner import lend_memory
from minidist.parallel.sharding.unit_runtime import UnitRuntime
from minidist.parallel.sharding.units import Unit, weakly
from minidist.parallel.training.clipping import guard
from minidist.parallel.training.master_weights import own_attribute


class UnitGradients:
    """The gradients of the `parameters` parameters in some units. Making it is a collective."""

    def __init__(self, units: Sequence[Unit], parameters: int, gradient_comm: GradientComm) -> None:
        self.gradient_comm, self.buckets = gradient_comm, list[Bucket]()
        self.used = bytearray(parameters)  # for each parameter index: has it had a gradient on this rank?
        self._last = Messages(iter(()))
        self.synchronized = False  # all ranks know which were used, and no backward pass has come since
        self.make(units)

    def make(self, units: Sequence[Unit]) -> None:
        """Make memory for the gradients of the units' buckets that are not frozen. A collective."""
        self.complete()
        self.buckets = [bucket for unit in units for bucket in unit.buckets if not bucket.frozen]
        self.memories = lend_memory(self.buckets, self.gradient_comm)

    def forget(self) -> None:
        """Forget the gradients; the next ones are the first."""
        self.complete()
        for bucket in self.buckets:
            bucket.begun = False
        self.used, self.synchronized = bytearray(len(self.used)), False

    def reduce(self, unit: Unit, ahead: bool) -> None:
        """Launch the reduction of a unit's gradients. ahead: while something else computes."""
        self.synchronized, over = False, self.gradient_comm
        for bucket in unit.buckets:
            if not bucket.frozen:
                self._fill(bucket)
                over.blocking = not ahead
                messages = bucket.reduce()
                if over.hybrid is not None:  # do not wait for the sum over copies
                    over.blocking = False
                    (self._last if ahead else messages).advance()
                    self._last = messages
                elif not ahead:
                    messages.complete()

    def _fill(self, bucket: Bucket) -> None:
        """Move the gradients of the parameters to the bucket."""
        bucket.complete()
        bucket.borrow()
        views, grads = [], []
        for view, parameter, index in zip(bucket.views, bucket.parameters, bucket.param_indices, strict=True):
            grad = parameter.grad
            if grad is None:
                view.zero_()
                continue
            views.append(view)
            grads.append(grad.to_dense() if grad.is_sparse else grad.detach())
            self.used[index] |= self.gradient_comm.counts
            parameter.grad = None
        if views:
            torch._foreach_copy_(views, grads)

    def complete(self) -> None:
        """Wait for all reductions."""
        for bucket in self.buckets:
            bucket.complete()


class UnitSharding:
    """Runs a model over `units`, and steps the optimizer of `slices`, whose own step and zero_grad call it.

    groups: of the optimizer. prefetch: gather a unit while the one before computes.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        slices: OptimizerSlices,
        groups: FlatParameterGroups,
        gradient_comm: GradientComm,
        prefetch: bool,
    ) -> None:
        hidden, optimizer = [*units[0].module.parameters()], slices.optimizer
        self.slices, self.groups, self.group = slices, groups, gradient_comm.group
        self.gradients = gradients = UnitGradients(units, len(hidden), gradient_comm)
        self.runtime = UnitRuntime(
            units, gradients.reduce, gradients.complete, weakly(self.follow_changes), self.group, prefetch
        )
        self._stepping = False  # the optimizer's step is called from here
        optimizer.register_step_pre_hook(weakly(self._before_step))
        optimizer.register_step_post_hook(weakly(self._after_step))
        optimizer.zero_grad = weakly(self.zero_grad)  # type: ignore[method-assign]
        for name in {*dir(type(optimizer))} - {*dir(torch.optim.Optimizer)}:  # such as `train`
            if not name.startswith("_"):
                setattr(optimizer, name, own_attribute(optimizer, name, weakly(self._after_step)))
        slices.guarded_by(weakly(self._why_not_clipped))
        guard(hidden, weakly(self._why_hidden))

    def follow_changes(self) -> None:
        """Begin with gradients of parameters that were frozen when this was made."""
        if work.is_alone:
            raise RuntimeError("it calls a model of which ZeRO 3 keeps parts on the other ranks")
        frozen = [bucket for unit in self.runtime.units for bucket in unit.buckets if bucket.frozen]
        self.thaw([bucket for bucket in frozen if any(p.requires_grad for p in bucket.parameters)])

    def thaw(self, buckets: Sequence[Bucket]) -> None:
        """Make room for the gradients and the optimizer state of frozen buckets. A collective."""
        if buckets:
            for bucket in buckets:
                dtype, device = self.slices.master or bucket.dtype, bucket.shard.device
                bucket.frozen, bucket.reduced = False, self.slices.memory.zeros(bucket.share, dtype, device)
                self.slices.add(bucket, self.groups.of)
            self.groups.begin((each.group, each.tensor) for each in self.slices.all)
            self.gradients.make(self.runtime.units)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, whose units are gathered as it calls them. A collective."""
        try:
            return self.runtime.root.module(*args, **kwargs)
        except BaseException:
            with suppress(CollectiveError):  # if a peer is gone, the first error says so
                self.runtime.abandon()
            raise

    def whole(self) -> Iterator[Tensor]:
        """Every parameter, gathered one unit at a time. A collective."""
        for unit in self.runtime.units:
            unit.show()
            try:
                yield from (parameter for bucket in unit.buckets for parameter in bucket.parameters)
            finally:
                unit.free()

    def _before_step(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RuntimeError("the optimizer of shards takes no closure; give it to the FullyShard's step()")
        if self.slices.memory.longest is not None:
            raise RuntimeError(
                "the optimizer's state lies on disk, and its own step() would bring all of it to memory; "
                "call the FullyShard's step()"
            )
        self.complete()

    def _after_step(self, *_: Any) -> None:
        if not self._stepping:
            self.slices.round_masters()
            self.runtime.changed()

    def _why_not_clipped(self, whole: bool) -> str | None:
        """Why `clip_grad_norm` must not shorten the pieces' gradients; whole: as if this rank had all."""
        if not self.gradients.synchronized:
            return "parameters has shards of a FullyShard, whose gradients are not complete"
        return "parameters has shards of a FullyShard, and sharded is False" if whole else None

    def _why_hidden(self, whole: bool) -> str:
        return "parameters has a module's inside a FullyShard, which get no gradients"

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Complete the gradients, update this rank's shards and publish them.

        closure: computes the gradients anew. An optimizer that requires one calls it itself.
        """
        given = {"closure": partial(self._evaluated, closure)}
        if closure is None or not requires_closure(self.slices.optimizer):
            self._evaluated(closure)
            given = {}
        self._stepping = True
        try:
            self.slices.step(**given)
        finally:
            self._stepping = False
        self._after_step()

    def _evaluated(self, closure: Callable[[], Any] | None) -> Any:
        """The loss by a closure, with what the optimizer has made of the shards; completes the gradients."""
        loss = None
        if closure is not None:
            self.slices.round_masters()
            self.runtime.changed()
            with torch.enable_grad():
                loss = closure()
        self.complete()
        return loss

    def synchronize(self, totals: Sequence[float | Tensor]) -> list[float]:
        """Complete the gradients; see `FullyShard.synchronize`."""
        self.runtime.finish()
        device = self.runtime.root.device
        used = [*map(float, self.gradients.used), *totals, *(0.0,) * (2 - len(totals))]
        counts = torch.tensor(used, dtype=torch.float64, device=device)
        counted: list[float] = comm.all_reduce(counts, group=self.group).tolist()
        self.slices.give_gradients(counted[:-2])
        self.gradients.synchronized = True
        return counted[-2:]

    def complete(self) -> None:
        """Complete the gradients, unless no backward pass has come since they were."""
        if not self.gradients.synchronized:
            self.synchronize(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.gradients.forget()
        self.runtime.forget_copies()
        self.slices.drop_gradients()
