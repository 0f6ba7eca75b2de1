"""A flat parameter: many parameters in one tensor, of which each rank keeps an n-th.

Gathered, the parameters are views into `full`. Freed, `full` keeps its place in torch, a storage of no bytes,
so that tensors which autograd has saved for the backward pass have their values back once it is gathered
again; and the parameters are a single NaN, expanded to their shapes: who reads them outside a pass sees it.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.flat.reassigned_data import reassigned

ParameterSlot = tuple[nn.Module, str]
"""A module and the name of its attribute."""


class FlatParameter:
    """Parameters of one dtype, one after the other, padded to a multiple of the ranks.

    Attributes:
        share: elements on each rank.
        trained: whether they get gradients.
        numbers: of the parameters, in the model.
        ranges: the elements of each in the flat tensor.
        shard: (share,), this rank's; set by who keeps the shards.
        offset: of the shard in the long tensor of all units' shards.
    """

    shard: Tensor
    offset: int

    def __init__(
        self, parameters: Sequence[tuple[int, str, nn.Parameter]], group: Group, device: torch.device
    ) -> None:
        self.numbers = [number for number, _, _ in parameters]
        self.names = [name for _, name, _ in parameters]
        self.parameters: list[nn.Parameter] = []  # once they have been taken
        first = parameters[0][2]
        self.dtype, self.device, self.trained = first.dtype, device, first.requires_grad
        self.shapes = [tuple(parameter.shape) for _, _, parameter in parameters]
        self.ranges, self.elements = [], 0
        for shape in self.shapes:
            self.ranges.append((self.elements, self.elements + math.prod(shape)))
            self.elements = self.ranges[-1][1]
        self.group, self.ranks, self.rank = group, len(ranks_of(group)), rank_in(group)
        self.share = -(-self.elements // self.ranks)
        self.size = self.share * self.ranks
        self._make()
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            nothing.fill_(math.nan)
        self._hidden = [nothing.expand(shape) for shape in self.shapes]
        self._work: comm.Work | None = None

    def _make(self) -> None:
        """A flat tensor with no memory yet."""
        self.full = torch.empty(self.size, dtype=self.dtype, device=self.device)
        self._storage, self._bytes = self.full.untyped_storage(), self.full.untyped_storage().nbytes()
        self._views = self.views_of(self.full)
        self._storage.resize_(0)

    @property
    def own(self) -> slice:
        """This rank's part of the flat tensor."""
        return slice(self.rank * self.share, (self.rank + 1) * self.share)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Parts of a flat tensor in the parameters' shapes."""
        pairs = zip(self.ranges, self.shapes, strict=True)
        return [flat[start:stop].view(shape) for (start, stop), shape in pairs]

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep this rank's shard of the parameters, with the group's rank 0's values, and free the rest."""
        self.parameters = [*parameters]
        self._storage.resize_(self._bytes)
        with torch.no_grad():
            for view, parameter in zip(self._views, parameters, strict=True):
                view.copy_(parameter)
            self.full[self.elements :] = 0
            comm.broadcast(self.full, group=self.group)
            self.shard.copy_(self.full[self.own])
        self.free()

    def gather(self, at_once: bool) -> None:
        """Launch the all-gather; sends n - 1 times the shard's bytes."""
        self._storage.resize_(self._bytes)
        shard = self.shard if self.shard.device == self.device else self.shard.to(self.device)
        if at_once:
            self._work = comm.all_gather(shard, group=self.group, out=self.full, async_op=True)
        else:
            comm.all_gather(shard, group=self.group, out=self.full)

    def wait(self) -> None:
        """Complete the all-gather."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def show(self) -> None:
        """Let the parameters be views into the gathered tensor."""
        self.wait()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def take_reassigned(self) -> None:
        """While it is shown: take over what `parameter.data = tensor` gave; see reassigned_data.py."""
        for number, value in reassigned(self.parameters, self._views).items():
            self._views[number].copy_(value)

    def free(self) -> None:
        """Give the gathered tensor's memory back."""
        self.wait()
        for parameter, hidden in zip(self.parameters, self._hidden, strict=True):
            parameter.data = hidden
        if self._storage.resizable():
            self._storage.resize_(0)
        else:  # NumPy has seen it; it is free once the backward pass needs it no more
            self._make()
