"""ZeRO's partition: which parameters lie in which bucket, and which part of a bucket is which rank's.

The first backward pass shows in which order gradients come. In this order parameters are dealt to flat
buckets, each cut into one share a rank (zero_buckets.py), and this rank's share to the pieces that its
optimizer updates (optimizer_slices.py). Parameters that get gradients later, since they were frozen or not
there, are dealt to further buckets by the next backward pass; those there are stay, and the state in them.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 5.1 (the optimizer's state in equal parts) and 5.2 (gradients in buckets, one part each).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minidist.parallel.flat.buckets import MB, GradientComm, broadcast_together, require_same
from minidist.parallel.guards.ownership import DATA_PARALLEL, ZERO, claim, owners, require_free
from minidist.parallel.guards.refusals import refuse_meta
from minidist.parallel.sharding.bucket_assignment import agree_on_order
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.reduce_to_owner import ShardPlan
from minidist.parallel.sharding.reducer import Reducer
from minidist.parallel.sharding.zero_buckets import ShardBucket, buckets_for, start_gathering
from minidist.parallel.training.clipping import guard


class Partition:
    """The parameters of an optimizer's groups, dealt to buckets and ranks. Making it is a collective.

    Args:
        inner: the optimizer whose groups come to hold this rank's pieces.
        groups: of whole parameters, with options; those that they get later are told with `add`.
        exchange: the ranks.
        stage: 1 or 2.
        bucket_mb: size of a bucket in MB (2^20 bytes), at most.
        master: the dtype in which parameters are updated; None for their own.

    Attributes:
        trained: the parameters that get gradients, or did; a place is a number in this list.
        orders: of places: each time that parameters were dealt to buckets.
        buckets: of all of them, in this order.
        pieces: this rank's share.
        masters: loaded, whole, of parameters in no bucket yet.
        keep: see `ShardPlan`; set it before the first backward pass.
        average: whether gradients become means over the ranks, and not sums.
        overlap: reduce while backward runs.
        reducer: of the gradients of `trained`.
        replaced: whether another has been made of the same parameters since.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        exchange: GradientComm,
        stage: int,
        bucket_mb: float,
        master: torch.dtype | None,
    ) -> None:
        self.inner, self.groups, self.exchange, self.bucket_mb = inner, groups, exchange, bucket_mb
        self.keep: Literal["own", "buckets", "shares"] = "own" if stage == 1 else "shares"
        self.average, self.overlap = True, True
        self.trained: list[nn.Parameter] = []
        self.orders: list[list[int]] = []
        self.buckets: list[ShardBucket] = []
        self.masters: dict[nn.Parameter, Tensor] = {}
        self.pieces = OptimizerSlices(inner, master)
        self.replaced = False
        self._before: ShardPlan | None = None  # of the parameters until now, which the next plan goes on with
        self._join([parameter for group in groups for parameter in group["params"]])
        self._attach()

    def add(self, parameters: list[nn.Parameter]) -> None:
        """Take parameters that the groups have got since. A collective."""
        self._join(parameters)
        self._reattach()

    def _join(self, parameters: list[nn.Parameter]) -> None:
        """Give new parameters rank 0's values; who replaces an optimizer by another has the old one still."""
        for parameter in parameters:
            if parameter.layout is not torch.strided:
                raise ValueError(
                    f"params has one of layout {parameter.layout}, which cannot be dealt out; "
                    "give dense parameters (their gradients may be sparse)"
                )
        named = [(str(i), p) for i, p in enumerate(parameters)]
        require_free(named, shared_with=[DATA_PARALLEL, ZERO])
        refuse_meta("params", named)
        if self.exchange.ranks > 1:
            require_same("parameters", named, self.exchange.group)
            broadcast_together(parameters, self.exchange.group)
        for other in owners(parameters, ZERO):
            if other is not self:
                other.reducer.detach()
                other.replaced = True
        claim(self, ZERO, parameters)

    # Hooks, on the parameters that get gradients.

    def _attach(self) -> None:
        """Put hooks on the parameters that get gradients now; a backward pass shows how to deal them."""
        itself = weakref.ref(self)  # no cycle: who replaces an optimizer has its hooks gone at once
        refused = "parameters has some of a ZeroOptimizer, whose gradients here are not the sums it will use"
        known = set(map(id, self.trained))
        for group in self.groups:
            guard(group["params"], lambda _: refused if itself() is not None else None)
            self.trained += [p for p in group["params"] if p.requires_grad and id(p) not in known]
        named = [(str(place), parameter) for place, parameter in enumerate(self.trained)]

        def make_plan(seen: Iterable[int]) -> ShardPlan:
            partition = itself()
            assert partition is not None  # it owns the reducer that asks
            return partition._plan(named, [*seen])

        self.reducer: Reducer[ShardPlan] = Reducer(named, self.exchange, self.overlap, make_plan)
        self.reducer.syncing, self.reducer.scale = self.keep == "shares", 1.0

    def _reattach(self) -> None:
        self._before = self.reducer.plan or self._before
        self.reducer.detach()
        self._attach()

    def follow_changes(self) -> None:
        """Hooks and buckets for parameters that get gradients since now; values that were put elsewhere."""
        self.take_reassigned()
        known = set(map(id, self.trained))
        if any(p.requires_grad and id(p) not in known for group in self.groups for p in group["params"]):
            self._reattach()

    # Dealing: to buckets, in the order of a backward pass.

    @property
    def waiting(self) -> list[int]:
        """The places of parameters that are in no bucket yet."""
        dealt = {place for order in self.orders for place in order}
        return [place for place in range(len(self.trained)) if place not in dealt]

    def _plan(self, named: list[tuple[str, nn.Parameter]], seen: list[int]) -> ShardPlan:
        """Buckets for the parameters that have none, and the plan of all. A collective."""
        exchange = self.exchange
        device = self.trained[0].device if self.trained else torch.device("cpu")
        if exchange.ranks > 1:
            require_same("parameters", named, exchange.group)
            seen = agree_on_order(seen, len(named), exchange, device)
        else:
            seen += [place for place in reversed(range(len(named))) if place not in set(seen)]
        self._deal(seen)
        op, before = "mean" if self.average else "sum", self._before
        self._before = None  # its buckets' memory goes with it
        return ShardPlan(self.trained, self.buckets, exchange, self.keep, op, before)

    def _deal(self, seen: Iterable[int]) -> None:
        """Buckets for those of the places that are in none, with what is kept of them. A collective."""
        waiting = set(self.waiting)
        order, limit = [place for place in seen if place in waiting], int(self.bucket_mb * MB)
        new = buckets_for(self.trained, order, limit, self.exchange, self.pieces.cut_anywhere)
        group_of = {id(p): number for number, group in enumerate(self.groups) for p in group["params"]}
        states = {
            place: self.inner.state.pop(self.trained[place])
            for place in order
            if self.trained[place] in self.inner.state
        }
        for bucket in new:
            self.pieces.add(bucket, [group_of[id(parameter)] for parameter in self.trained])
        for _, fragment, tensor, _ in self.pieces.parts():
            master = self.masters.get(self.trained[fragment.place])
            if master is not None:
                tensor.copy_(master.reshape(-1)[fragment.start : fragment.stop])
        for place in order:
            self.masters.pop(self.trained[place], None)
        self.buckets += new
        if order:
            self.orders.append(order)
        if states:
            self.pieces.take(states)

    def arrange(self, orders: Iterable[Iterable[int]]) -> None:
        """Make the buckets that another run had, whose `orders` these are. A collective.

        Does nothing where there are buckets. What is in none of the orders waits for a backward pass.
        """
        if self.buckets:
            return
        for order in orders:
            self._deal(order)
        if self.buckets and not self.waiting:
            self.reducer.settled()

    # Values: out of the shares to all ranks, and those that were put in from outside.

    def gather(self) -> None:
        """Bring everyone's share of the parameters to all: launch, wait.

        A rank sends (n - 1) / n of every bucket.
        """
        for work in start_gathering(self.buckets, self.exchange):
            work.wait()

    @torch.no_grad()
    def take_reassigned(self) -> None:
        """Take over what `parameter.data = tensor` gave on all ranks; see flat/reassigned_data.py."""
        found = {place: (v, new) for bucket in self.buckets for place, v, new in bucket.reassigned()}
        if found:
            self.pieces.take_values(found)
            for view, value in found.values():
                view.copy_(value)

    @torch.no_grad()
    def reload(self) -> None:
        """After masters and state were written to: take them into the parameters. A collective."""
        if self.pieces.reload():
            self.gather()
        for parameter, master in self.masters.items():
            parameter.copy_(master)
