"""ZeRO's partition: which parameters lie in which bucket, and which rank owns which part of a bucket.

The first backward pass shows the order in which gradients come. In this order parameters are dealt to flat
buckets, each cut into one share for each rank (flat/buckets.py), and this rank's share to the slices that its
optimizer updates (optimizer_slices.py). Parameters that get gradients only later, because they were frozen or
not there, are dealt to further buckets by the next backward pass; the buckets before stay, with their state.

Source: Rajbhandari et al. 2020, "ZeRO" (see zero.py), sections 5.1 (the optimizer's state in equal parts) and
5.2 (gradients in buckets, one part each).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import bytes_of
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.flat.joined_messages import MB, broadcast_together, cut, require_same
from minidist.parallel.guards.ownership import DATA_PARALLEL, ZERO, claim, owners, require_free
from minidist.parallel.guards.refusals import refuse_meta
from minidist.parallel.sharding.bucket_assignment import agree_on_order
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.reduce_to_owner import GradientResidency, ShardAssignment
from minidist.parallel.sharding.reducer import Reducer
from minidist.parallel.sharding.units import weakly
from minidist.parallel.training.clipping import guard


class Partition:
    """The parameters of an optimizer's groups, dealt to buckets and owners. Making it is a collective.

    inner: the optimizer whose groups come to hold this rank's slices. groups: of whole parameters, with
    options; call `add` when they get more. master: the dtype in which parameters are updated; None for their
    own.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        gradient_comm: GradientComm,
        stage: int,
        bucket_mb: float,
        master: torch.dtype | None,
    ) -> None:
        self.inner, self.groups, self.bucket_mb = inner, groups, bucket_mb
        self.gradient_comm = gradient_comm
        self.residency: GradientResidency = "own" if stage == 1 else "shares"  # set it before a backward pass
        self.average = True  # gradients become means over the ranks, and not sums
        self.overlap = True  # reduce while backward runs
        self.trained: list[nn.Parameter] = []  # get gradients, or did; parameter indices number this list
        self.known: set[int] = set()  # the identities of those with hooks
        self.orders: list[list[int]] = []  # parameter indices, for each time that some were dealt to buckets
        self.buckets: list[Bucket] = []  # of all orders
        self.slices = OptimizerSlices(inner, master)  # this rank's share
        self.masters: dict[nn.Parameter, Tensor] = {}  # whole, loaded for parameters in no bucket yet
        self.names: Mapping[Tensor, str] = {}  # for messages, where they are known
        self.replaced = False  # another partition has been made of the same parameters
        self._before: ShardAssignment | None = None  # the next assignment continues it
        self._join(self.parameters)
        self._attach()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the groups, in order."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def add(self, parameters: list[nn.Parameter]) -> None:
        """Take parameters that were added to the groups. A collective."""
        self._join(parameters)
        self.reattach()

    def _join(self, parameters: list[nn.Parameter]) -> None:
        """Give new parameters rank 0's values, and take them from an optimizer that this one replaces."""
        for parameter in parameters:
            if parameter.layout is not torch.strided:
                raise ValueError(
                    f"params has one of layout {parameter.layout}, which cannot be dealt out; "
                    "give dense parameters (their gradients may be sparse)"
                )
        named = [(str(i), p) for i, p in enumerate(parameters)]
        require_free(named, shared_with=[DATA_PARALLEL, ZERO])
        refuse_meta("params", named)
        if self.gradient_comm.ranks > 1:
            require_same("parameters", named, self.gradient_comm.group)
            broadcast_together(parameters, self.gradient_comm.group)
        for other in owners(parameters, ZERO):
            if other is not self:
                other.reducer.detach()
                other.replaced = True
        claim(self, ZERO, parameters)

    # Hooks, on the parameters that get gradients.

    def _attach(self) -> None:
        """Put hooks on the parameters that get gradients now; a backward pass shows how to deal them."""
        itself = weakref.ref(self)  # no reference cycle: a replaced optimizer's hooks go at once
        refused = "parameters has some of a ZeroOptimizer, whose gradients here are not the sums it will use"
        guard(self.parameters, lambda _: refused if itself() is not None else None)
        trained = [p for p in self.parameters if p.requires_grad]
        self._list(trained)
        self.known = set(map(id, trained))
        named = [(str(index), parameter) for index, parameter in enumerate(self.trained)]

        def assign(seen: Iterable[int]) -> ShardAssignment:
            partition = itself()
            assert partition is not None  # it owns the reducer that asks
            return partition._assign(named, [*seen])

        self.reducer: Reducer[ShardAssignment] = Reducer(named, self.gradient_comm, self.overlap, assign)
        self.reducer.syncing, self.reducer.scale = self.residency == "shares", 1.0

    def _list(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Number parameters that have no index yet; returns whether there are any."""
        listed = set(map(id, self.trained))
        new = [parameter for parameter in parameters if id(parameter) not in listed]
        self.trained += new
        return bool(new)

    def expect(self, frozen: Iterable[nn.Parameter]) -> None:
        """Deal these to buckets too: they get no gradients now, but the optimizer has state of them."""
        if self._list(frozen):
            self.reattach()

    def follow_changes(self) -> None:
        """Make hooks and buckets for parameters that get gradients from now on; refuse reassigned data."""
        for bucket in self.buckets:
            bucket.refuse_reassigned()
        if any(p.requires_grad and id(p) not in self.known for p in self.parameters):
            self.reattach()

    def reattach(self) -> None:
        """Make hooks for the parameters that get gradients now; a backward pass deals them to buckets."""
        self._before = self.reducer.assignment or self._before
        self.reducer.detach()
        self._attach()

    def _name_of(self, param_index: int) -> str:
        parameter = self.trained[param_index]
        index = next(i for i, each in enumerate(self.parameters) if each is parameter)
        return self.names.get(parameter, f"number {index} of params, of shape {tuple(parameter.shape)},")

    # Dealing: to buckets, in the order of a backward pass.

    @property
    def waiting(self) -> list[int]:
        """The indices of parameters that are in no bucket yet."""
        dealt = {index for order in self.orders for index in order}
        return [index for index in range(len(self.trained)) if index not in dealt]

    def _assign(self, named: list[tuple[str, nn.Parameter]], seen: list[int]) -> ShardAssignment:
        """Deal the parameters that are in no bucket, and assign all. A collective."""
        gradient_comm = self.gradient_comm
        device = self.trained[0].device if self.trained else torch.device("cpu")
        if gradient_comm.ranks > 1:
            require_same("parameters", named, gradient_comm.group)
            seen = agree_on_order(seen, len(named), gradient_comm, device)
        else:
            seen += [index for index in reversed(range(len(named))) if index not in set(seen)]
        self._deal(seen)
        op, before = "mean" if self.average else "sum", self._before
        self._before = None  # its buckets' memory goes with it
        return ShardAssignment(self.trained, self.buckets, gradient_comm, self.residency, op, before)

    def _deal(self, seen: Iterable[int]) -> None:
        """Make buckets, with loaded state, for the parameters in `seen` that are in none. A collective."""
        waiting = set(self.waiting)
        order, limit = [index for index in seen if index in waiting], int(self.bucket_mb * MB)
        cut_anywhere = self.slices.cut_anywhere
        if not cut_anywhere and order:  # a large parameter's bucket would be mostly padding
            limit = max(limit, self.gradient_comm.owners * max(bytes_of(self.trained[i]) for i in order))
        new = [
            Bucket(part, self.trained, self.gradient_comm, cut_anywhere, name_of=weakly(self._name_of))
            for part in cut(self.trained, order, limit)
            if part
        ]
        number_of = {id(p): number for number, group in enumerate(self.groups) for p in group["params"]}
        group_of = {index: number_of[id(parameter)] for index, parameter in enumerate(self.trained)}
        states = {
            index: self.inner.state.pop(self.trained[index])
            for index in order
            if self.trained[index] in self.inner.state
        }
        for bucket in new:
            bucket.keep_values()
            self.slices.add(bucket, group_of)
        for _, span, tensor, _ in self.slices.by_parameter():
            master = self.masters.get(self.trained[span.param_index])
            if master is not None:
                tensor.copy_(master.reshape(-1)[span.start : span.stop])
        for index in order:
            self.masters.pop(self.trained[index], None)
        self.buckets += new
        if order:
            self.orders.append(order)
        if states:
            self.slices.take(states)

    def arrange(self, orders: Iterable[Iterable[int]]) -> None:
        """Make the buckets that another run had, from its `orders`, unless there are some. A collective."""
        if self.buckets:
            return
        for order in orders:
            self._deal(order)
        if self.buckets and not self.waiting:
            self.reducer.settled()

    # A step: options to and from the optimizer of this rank's slices, and parameters to all ranks.

    def give_options(self) -> None:
        """Give the optimizer the options of `groups`."""
        _pass_options(self.groups, self.inner.param_groups)

    def updated(self) -> None:
        """Take the options that the optimizer has set, and publish what it has updated. A collective."""
        _pass_options(self.inner.param_groups, self.groups)
        self.slices.round_masters()
        self.publish()

    def publish(self) -> None:
        """Bring everyone's share of the parameters to all: an all-gather of each bucket."""
        for bucket in self.buckets:  # launch
            self.gradient_comm.blocking = bucket is self.buckets[-1]
            bucket.gather()
        for bucket in self.buckets:  # wait
            bucket.wait()


def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for have, take in zip(source, target, strict=True):
        take.update({key: value for key, value in have.items() if key != "params"})
