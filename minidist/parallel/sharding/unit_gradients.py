"""Gradients of a unit become this rank's sums: copied into one flat buffer, reduced, added to the shard's.

The buffer lies in memory that the ranks share where they can, and serves all units in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.flat.flat_parameter import FlatParameter
from minidist.parallel.sharding.flat_shards import FlatShards
from minidist.parallel.sharding.units import Unit

BUFFERS = 2
"""While one is reduced, the next unit fills the other."""


class UnitGradients:
    """The gradients of the flats in `stores`.

    Attributes:
        operation: "mean" or "sum" over the ranks.
        used: for each parameter's number, whether it has had a gradient on this rank.
        synchronized: no backward pass has come since all ranks knew which were used.
    """

    def __init__(self, stores: Sequence[FlatShards], parameters: int, group: Group) -> None:
        self._group = group
        self._stores = {id(flat): store for store in stores for flat in store.flats}
        self.operation = "mean"
        self.used, self.synchronized = bytearray(parameters), False
        self._begun: set[int] = set()  # flats whose shard has a gradient to add to
        self.buffers: dict[torch.dtype, list[Tensor]] = {}
        for store in stores:
            if store.trained:
                longest, first = max(flat.size for flat in store.flats), store.flats[0]
                self.buffers[first.dtype] = [self._empty(longest, first) for _ in range(BUFFERS)]
        self._under_way: dict[
            int, tuple[Any, FlatParameter, Tensor | None]
        ] = {}  # by the address of the buffer

    def _empty(self, length: int, like: FlatParameter) -> Tensor:
        if like.device.type == "cpu":
            return comm.empty_shared((length,), like.dtype, self._group)
        return torch.zeros(length, dtype=like.dtype, device=like.device)

    def forget(self) -> None:
        """The next gradients are the first ones."""
        self.complete()
        self._begun.clear()
        self.used, self.synchronized = bytearray(len(self.used)), False

    def reduce(self, unit: Unit, ahead: bool) -> None:
        """Launch the reduction of what gradients a unit's parameters have. ahead: while others compute."""
        self.synchronized = False
        for flat in unit.flats:
            if flat.trained:
                self._reduce(flat, ahead)

    def _reduce(self, flat: FlatParameter, ahead: bool) -> None:
        # Launch: into the flat buffer, which an earlier reduction may still read.
        buffers = self.buffers[flat.dtype]
        buffer = buffers[0][: flat.size]
        buffers.append(buffers.pop(0))
        self._complete(buffer.data_ptr())
        views, grads, unused = [], [], []
        for view, parameter, number in zip(flat.views_of(buffer), flat.parameters, flat.numbers, strict=True):
            grad = parameter.grad
            if grad is None:
                unused.append(view)
                continue
            views.append(view)
            grads.append(grad.to_dense() if grad.is_sparse else grad.detach())
            self.used[number] = True
            parameter.grad = None
        if unused:
            torch._foreach_zero_(unused)
        if views:
            torch._foreach_copy_(views, grads)
        del grads
        if flat.size > flat.elements:
            buffer[flat.elements :] = 0

        # Compute meanwhile, if there is a place for the result where nothing has to be added.
        store = self._stores[id(flat)]
        assert store.grad is not None
        into = store.grad[flat.offset : flat.offset + flat.share]
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

    def _add(self, flat: FlatParameter, part: Tensor) -> None:
        store = self._stores[id(flat)]
        assert store.grad is not None
        into = store.grad[flat.offset : flat.offset + flat.share]
        if id(flat) in self._begun:
            into.add_(part.to(into.device))
        else:
            into.copy_(part)
            self._begun.add(id(flat))

    def _complete(self, key: int) -> None:
        found = self._under_way.pop(key, None)
        if found is not None:
            work, flat, part = found
            work.wait()
            if part is not None:
                self._add(flat, part)

    def complete(self) -> None:
        """Wait for all reductions."""
        for key in [*self._under_way]:
            self._complete(key)
