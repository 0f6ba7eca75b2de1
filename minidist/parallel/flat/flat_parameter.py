"""A flat parameter: many parameters in one tensor, of which each rank keeps an n-th between passes.

While it is gathered, the parameters are views into `full`. Freed, `full` keeps its identity in torch with a
storage of no bytes: tensors that autograd saved for the backward pass have their values again after the next
gather. The parameters are then a single NaN, expanded to their shapes, so that reading one outside a pass
shows.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.flat.reassigned_data import addresses, refuse_reassigned

ParameterSlot = tuple[nn.Module, str]
"""A module and the name of the attribute that holds a parameter."""


class FlatParameter:
    """Parameters of one dtype, one after the other, padded to a multiple of the number of ranks.

    parameters: for each its index in the model, its name and itself; all trained or all frozen.
    """

    shard: Tensor  # (share,), this rank's elements; set by `FlatShards`
    offset: int  # where the shard begins in the long tensor of all units' shards

    def __init__(
        self, parameters: Sequence[tuple[int, str, nn.Parameter]], group: Group, device: torch.device
    ) -> None:
        self.param_indices = [index for index, _, _ in parameters]
        self.names = [name for _, name, _ in parameters]
        self.parameters: list[nn.Parameter] = []  # after `take`
        first = parameters[0][2]
        self.dtype, self.device, self.trained = first.dtype, device, first.requires_grad
        self.shapes = [tuple(parameter.shape) for _, _, parameter in parameters]
        self.ranges, self.elements = [], 0  # the elements of each parameter in the flat tensor
        for shape in self.shapes:
            self.ranges.append((self.elements, self.elements + math.prod(shape)))
            self.elements = self.ranges[-1][1]
        self.group, self.ranks, self.rank = group, len(ranks_of(group)), rank_in(group)
        self.share = -(-self.elements // self.ranks)  # elements on each rank
        self.size = self.share * self.ranks
        self._make()
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            nothing.fill_(math.nan)
        self._hidden = [nothing.expand(shape) for shape in self.shapes]
        self._hidden_addresses = addresses(self._hidden)
        self._work: comm.Work | None = None

    def _make(self) -> None:
        """Make a flat tensor that has no memory yet."""
        self.full = torch.empty(self.size, dtype=self.dtype, device=self.device)
        self._storage, self._bytes = self.full.untyped_storage(), self.full.untyped_storage().nbytes()
        self._views = self.views_of(self.full)
        self._storage.resize_(0)

    @property
    def own(self) -> slice:
        """This rank's part of the flat tensor."""
        return slice(self.rank * self.share, (self.rank + 1) * self.share)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor in the parameters' shapes."""
        pairs = zip(self.ranges, self.shapes, strict=True)
        return [flat[start:stop].view(shape) for (start, stop), shape in pairs]

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep this rank's shard of the group's rank 0's values of the parameters, and free the rest."""
        self.parameters = [*parameters]
        self._storage.resize_(self._bytes)
        with torch.no_grad():
            for view, parameter in zip(self._views, parameters, strict=True):
                view.copy_(parameter)
            self.full[self.elements :] = 0
            comm.broadcast(self.full, group=self.group)
            self.shard.copy_(self.full[self.own])
        self.free()

    def gather(self, ahead: bool) -> None:
        """Launch the all-gather; a rank sends n - 1 times the shard's bytes. ahead: do not wait for it."""
        self._storage.resize_(self._bytes)
        shard = self.shard if self.shard.device == self.device else self.shard.to(self.device)
        if ahead:
            self._work = comm.all_gather(shard, group=self.group, out=self.full, async_op=True)
        else:
            comm.all_gather(shard, group=self.group, out=self.full)

    def wait(self) -> None:
        """Complete the all-gather."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def show(self) -> None:
        """Make the parameters views into the gathered tensor."""
        self.wait()
        refuse_reassigned(self.parameters, self._hidden_addresses, self.names.__getitem__)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def refuse_reassigned(self) -> None:
        """While it is shown: ValueError where a parameter is no longer a view into the gathered tensor."""
        refuse_reassigned(self.parameters, addresses(self._views), self.names.__getitem__)

    def free(self) -> None:
        """Give the gathered tensor's memory back."""
        self.wait()
        for parameter, hidden in zip(self.parameters, self._hidden, strict=True):
            parameter.data = hidden
        if self._storage.resizable():
            self._storage.resize_(0)
        else:  # NumPy has seen it; its memory is free once the backward pass no longer needs it
            self._make()
