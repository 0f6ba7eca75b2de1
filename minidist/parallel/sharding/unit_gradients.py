"""Reduces a unit's gradients to their owners, and knows which parameters had one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.sharding.reduce_to_owner import lend_memory
from minidist.parallel.sharding.units import Unit


class UnitGradients:
    """The gradients of the `parameters` parameters in some units. Making it is a collective."""

    def __init__(self, units: Sequence[Unit], parameters: int, gradient_comm: GradientComm) -> None:
        self.gradient_comm = gradient_comm
        self.buckets = [bucket for unit in units for bucket in unit.buckets if not bucket.frozen]
        self.memories = lend_memory(self.buckets, gradient_comm)
        self.operation = "mean"  # or "sum" over the ranks
        self.used = bytearray(parameters)  # for each parameter index: has it had a gradient on this rank?
        self.synchronized = False  # all ranks know which were used, and no backward pass has come since

    def forget(self) -> None:
        """Forget the gradients; the next ones are the first."""
        self.complete()
        for bucket in self.buckets:
            bucket.begun = False
        self.used, self.synchronized = bytearray(len(self.used)), False

    def reduce(self, unit: Unit, ahead: bool) -> None:
        """Launch the reduction of a unit's gradients. ahead: while something else computes."""
        self.synchronized = False
        self.gradient_comm.blocking = not ahead
        for bucket in unit.buckets:
            if not bucket.frozen:
                self._fill(bucket)
                messages = bucket.reduce(self.operation)
                if not ahead:
                    messages.complete()

    def _fill(self, bucket: Bucket) -> None:
        """Move the gradients of the parameters to the bucket."""
        bucket.complete()
        bucket.borrow()
        views, grads, unused = [], [], []
        for view, parameter, index in zip(bucket.views, bucket.parameters, bucket.param_indices, strict=True):
            grad = parameter.grad
            if grad is None:
                unused.append(view)
                continue
            views.append(view)
            grads.append(grad.to_dense() if grad.is_sparse else grad.detach())
            self.used[index] = True
            parameter.grad = None
        if unused:
            torch._foreach_zero_(unused)
        if views:
            torch._foreach_copy_(views, grads)

    def complete(self) -> None:
        """Wait for all reductions."""
        for bucket in self.buckets:
            bucket.complete()
