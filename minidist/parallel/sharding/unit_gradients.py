"""Reduces a unit's gradients to their owners: copied into a flat buffer, reduced, added to the sums.

The buffer lies in memory that the ranks share where they can, and serves all units in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.flat.flat_parameter import FlatParameter
from minidist.parallel.sharding.flat_shards import FlatShards
from minidist.parallel.sharding.units import Unit

BUFFERS = 2
"""While one is reduced, the next unit fills the other."""


class UnitGradients:
    """The gradients of the flat parameters in `flat_shards`."""

    def __init__(self, flat_shards: Sequence[FlatShards], parameters: int, group: Group) -> None:
        self._group = group
        self._shards_of = {id(flat): shards for shards in flat_shards for flat in shards.flat_parameters}
        self.operation = "mean"  # or "sum" over the ranks
        self.used = bytearray(parameters)  # for each parameter index: has it had a gradient on this rank?
        self.synchronized = False  # all ranks know which were used, and no backward pass has come since
        self._begun: set[int] = set()  # flat parameters whose shard has a gradient to add to
        self.buffers: dict[torch.dtype, list[Tensor]] = {}
        zeros = GradientComm(group).zeros
        for shards in flat_shards:
            if shards.trained:
                longest, first = max(flat.size for flat in shards.flat_parameters), shards.flat_parameters[0]
                self.buffers[first.dtype] = [
                    zeros(longest, first.dtype, first.device) for _ in range(BUFFERS)
                ]
        # By a buffer's address: the message, what it reduces, and its result if that is to be added.
        self._under_way: dict[int, tuple[Any, FlatParameter, Tensor | None]] = {}

    def forget(self) -> None:
        """Forget the gradients; the next ones are the first."""
        self.complete()
        self._begun.clear()
        self.used, self.synchronized = bytearray(len(self.used)), False

    def reduce(self, unit: Unit, ahead: bool) -> None:
        """Launch the reduction of a unit's gradients. ahead: while something else computes."""
        self.synchronized = False
        for flat in unit.flat_parameters:
            if flat.trained:
                self._reduce(flat, ahead)

    def _reduce(self, flat: FlatParameter, ahead: bool) -> None:
        # Copy into the flat buffer, which an earlier reduction may still read.
        buffers = self.buffers[flat.dtype]
        buffer = buffers[0][: flat.size]
        buffers.append(buffers.pop(0))
        self._complete(buffer.data_ptr())
        views, grads, unused = [], [], []
        for view, parameter, index in zip(
            flat.views_of(buffer), flat.parameters, flat.param_indices, strict=True
        ):
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
        del grads
        if flat.size > flat.elements:
            buffer[flat.elements :] = 0

        # Launch: straight into the shard's gradient where nothing has to be added to it.
        into = self._gradient(flat)
        direct = id(flat) not in self._begun and into.dtype == flat.dtype and into.device == flat.device
        out = into if direct else torch.empty(flat.share, dtype=flat.dtype, device=flat.device)
        if ahead:
            work = comm.reduce_scatter(buffer, self.operation, group=self._group, out=out, async_op=True)
            self._under_way[buffer.data_ptr()] = work, flat, None if direct else out
        else:
            comm.reduce_scatter(buffer, self.operation, group=self._group, out=out)
            if not direct:
                self._add(flat, out)
        if direct:
            self._begun.add(id(flat))

    def _gradient(self, flat: FlatParameter) -> Tensor:
        """The gradient of this rank's shard, (share,)."""
        shards = self._shards_of[id(flat)]
        assert shards.grad is not None
        return shards.grad[flat.offset : flat.offset + flat.share]

    def _add(self, flat: FlatParameter, part: Tensor) -> None:
        into = self._gradient(flat)
        if id(flat) in self._begun:
            into.add_(part.to(into.device))
        else:
            into.copy_(part)
            self._begun.add(id(flat))

    def _complete(self, key: int) -> None:
        if key in self._under_way:
            work, flat, part = self._under_way.pop(key)
            work.wait()
            if part is not None:
                self._add(flat, part)

    def complete(self) -> None:
        """Wait for all reductions."""
        for key in [*self._under_way]:
            self._complete(key)
