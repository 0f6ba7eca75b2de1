"""ZeRO, stages 1 and 2: each rank keeps the optimizer's state of its share of the parameters alone.

Every rank has the whole model and computes on its rows, as in data parallelism. But what all would do alike,
each does for its n-th of the parameters: a reduce-scatter brings it that share of the gradients, summed; it
updates the share; an all-gather brings everyone's shares to all. An all-reduce is just these two, so a step
sends what data parallelism sends. Stage 2 reduces gradients as backward goes, and keeps its share of them
alone.

| Bytes a parameter, Adam in float32 | parameters | gradients | state |
|---|---|---|---|
| data parallelism | 4 | 4 | 8 |
| stage 1 | 4 | 4 | 8 / n |
| stage 2 | 4 | 4 / n | 8 / n |

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 5.1, 5.2 and 7.1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.buckets import MB, Exchange, broadcast_together, require_same
from minidist.parallel.clipping import check_max_norm, check_norm_type, clip_factor, global_norm, guard
from minidist.parallel.plan import agree_on_order
from minidist.parallel.reducer import Reducer
from minidist.parallel.zero_buckets import ShardBucket, buckets_for, start_gathering
from minidist.parallel.zero_pieces import Pieces
from minidist.parallel.zero_plan import ShardPlan
from minidist.parallel.zero_state import consolidated, load

REFUSED = {
    torch.optim.LBFGS: "its steps look at all parameters at once",
    torch.optim.SparseAdam: "its gradients are sparse",
}


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is spread over the ranks; used as torch's ZeroRedundancyOptimizer is.

    >>> optimizer = md.ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    >>> loss = cross_entropy(model(inputs), targets)
    >>> loss.backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()

    Rank 0's parameters are sent to all when it is made. `step` averages the gradients over the ranks itself,
    so the model needs no `DataParallel`; with one around it, stage 1 averages equal gradients, which changes
    nothing, and stage 2, which takes gradients as they come, must not be used. All ranks call `step`.

    The result is that of `optimizer_class` in one process, to rounding. torch's optimizers that look at each
    element alone (`elementwise.ELEMENTWISE`) update a share of equal size on each rank. Of others, such as
    Adafactor, Muon or one's own, a rank updates whole parameters. A parameter that had no gradient on any
    rank is left out, as in torch.

    Stage 1 leaves `grad` as backward left it. Stage 2 sums gradients over the ranks in each backward pass and
    sets `grad` to None: all ranks make as many backward passes, accumulation adds up in the owner's share (to
    add up on this rank, without sending, would take whole gradients), and a step, or `zero_grad`, ends it.
    The first backward pass, which shows the order in which gradients come, holds all of them.

    Parameters become views into flat buffers in the first step. What a step sends: `bytes_per_step`.

    Args:
        params: parameters, or dicts with parameters and options of their own; the same on all ranks.
        optimizer_class: a class of torch's, or another function from parameters and `defaults` to an
            optimizer.
        stage: 1 to share the optimizer's state, 2 to share the gradients too.
        group: the ranks that share; None for all.
        bucket_mb: size of a bucket in MB (2^20 bytes), at most. In stage 2 two of them have memory at a time.
        master: the dtype in which parameters are updated, where it is not their own: the rank then keeps its
            share of them in it, too.
        defaults: options of the optimizer.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks' parameters differ, or the optimizer is one
            whose state cannot be shared.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        stage: int = 1,
        group: Group = None,
        *,
        bucket_mb: float = 25,
        master: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        self._made = False
        if stage not in (1, 2) or isinstance(stage, bool):
            raise ValueError(f"stage is {stage!r}; give 1 or 2, or use FullyShard for stage 3")
        if isinstance(optimizer_class, torch.optim.Optimizer) or not callable(optimizer_class):
            raise TypeError(
                f"optimizer_class is a {type(optimizer_class).__name__}; give a class, such as "
                "torch.optim.AdamW"
            )
        if isinstance(bucket_mb, bool) or not (isinstance(bucket_mb, int | float) and 0 <= bucket_mb < inf):
            raise ValueError(f"bucket_mb is {bucket_mb!r}; give megabytes, or 0 for one message a parameter")
        if master is not None and not (isinstance(master, torch.dtype) and master.is_floating_point):
            raise TypeError(f"master is {master!r}; give a floating-point dtype, such as torch.float32")
        self.inner = optimizer_class(params, **defaults)
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer_class made a {type(self.inner).__name__}; it has to make a torch.optim.Optimizer"
            )
        for refused, reason in REFUSED.items():
            if isinstance(self.inner, refused):
                raise ValueError(
                    f"optimizer_class is {refused.__name__}, which cannot be shared by parts, since "
                    f"{reason}; use it with DataParallel"
                )
        self.stage, self.group, self.bucket_mb = stage, group, bucket_mb
        self.exchange = Exchange(group)
        self.keep: Literal["own", "buckets", "shares"] = "own" if stage == 1 else "shares"
        self.average, self.overlap = True, True
        self.buckets: list[ShardBucket] = []
        self.orders: list[list[int]] = []  # of places: each time that parameters were dealt to buckets
        self.masters: dict[nn.Parameter, Tensor] = {}  # loaded, whole, of parameters in no bucket yet
        self.pieces = Pieces(self.inner, master)
        self.trained: list[nn.Parameter] = []
        self._consolidated: dict[str, Any] | None = None
        super().__init__([{**group} for group in self.inner.param_groups], self.inner.defaults)
        self._made = True
        self._join([parameter for group in self.param_groups for parameter in group["params"]])
        self._before: ShardPlan | None = None
        self._clipped = False  # this step's gradients are summed, and shortened
        self._attach()

    def _join(self, parameters: list[nn.Parameter]) -> None:
        """Give new parameters rank 0's values."""
        for parameter in parameters:
            if parameter.layout is not torch.strided:
                raise ValueError(
                    f"params has one of layout {parameter.layout}, which cannot be dealt out; "
                    "give dense parameters (their gradients may be sparse)"
                )
        if self.exchange.ranks > 1:
            require_same("parameters", [(str(i), p) for i, p in enumerate(parameters)], self.group)
            broadcast_together(parameters, self.group)

    def _attach(self) -> None:
        """Put hooks on the parameters that get gradients now; a backward pass shows how to deal them."""
        itself = weakref.ref(self)  # no cycle: who replaces an optimizer has its hooks gone at once
        refused = "parameters has some of a ZeroOptimizer, whose gradients here are not the sums it will use"
        known = set(map(id, self.trained))
        for group in self.param_groups:
            guard(group["params"], lambda _: refused if itself() is not None else None)
            self.trained += [p for p in group["params"] if p.requires_grad and id(p) not in known]
        named = [(str(place), parameter) for place, parameter in enumerate(self.trained)]

        def make_plan(seen: Iterable[int]) -> ShardPlan:
            optimizer = itself()
            assert optimizer is not None  # it owns the reducer that asks
            return optimizer._place(named, [*seen])

        self.reducer: Reducer[ShardPlan] = Reducer(named, self.exchange, self.overlap, make_plan)
        self.reducer.syncing, self.reducer.scale = self.keep == "shares", 1.0

    def _place(self, named: list[tuple[str, nn.Parameter]], seen: list[int]) -> ShardPlan:
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
        group_of = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
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

    @property
    def waiting(self) -> list[int]:
        """The places of parameters that are in no bucket yet."""
        dealt = {place for order in self.orders for place in order}
        return [place for place in range(len(self.trained)) if place not in dealt]

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

    def follow_changes(self) -> None:
        """Hooks and buckets for parameters that get gradients since now."""
        known = set(map(id, self.trained))
        if any(
            p.requires_grad and id(p) not in known for group in self.param_groups for p in group["params"]
        ):
            self._reattach()

    def _reattach(self) -> None:
        self._before = self.reducer.plan or self._before
        self.reducer.detach()
        self._attach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own, that get rank 0's values. A collective.

        Raises:
            ValueError: some are there already, or differ between ranks.
        """
        super().add_param_group(param_group)
        if self._made:
            added = self.param_groups[-1]
            self.inner.add_param_group({**added})
            self._join(added["params"])
            self._reattach()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, the sums of stage 2 too."""
        self._clipped, self.pieces.factor = False, 1.0
        self.reducer.recover()
        if self.reducer.plan is not None:
            self.reducer.plan.begin()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Sum the gradients over the ranks, update this rank's share, and gather everyone's. A collective.

        Args:
            closure: computes the loss and its gradients anew.
            **options: arguments that the optimizer's own `step` has beside.

        Returns:
            What the closure returned, or None.

        Raises:
            CollectiveError: a peer is gone or late.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._clipped:
            self.synchronize()
        elif self.reducer.pending:
            raise RuntimeError("gradients came after clip_grad_norm; call it after the last backward()")
        self._clipped = False
        self.update(**options)
        return loss

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Shorten the gradients where their norm over all ranks is above `max_norm`; call it before `step`.

        As `torch.nn.utils.clip_grad_norm_` does in one process; `grad` of the parameters stays as it is. A
        collective: it sums the gradients, which `step` then need not, and sends 2 (n - 1) / n 8 bytes more.

        Args:
            max_norm: above 0.
            norm_type: the p of the p-norm, above 0, or `math.inf`.

        Returns:
            The norm before.
        """
        check_max_norm("max_norm", max_norm)
        check_norm_type(norm_type)
        if not self._clipped:
            self.synchronize()
            self._clipped = True
        norm = global_norm(self.gradients(), True, self.group, norm_type) * self.pieces.factor
        self.pieces.factor *= clip_factor(norm, max_norm)
        return norm

    def synchronize(self) -> ShardPlan:
        """Complete this rank's share of the gradients; `step` does so itself."""
        self.follow_changes()
        self.reducer.synchronize()
        return self.reducer.settled()

    @torch.no_grad()
    def update(self, **options: Any) -> None:
        """The step that follows `synchronize`; `options` are for the optimizer's own."""
        plan = self.reducer.settled()
        self._consolidated = None

        # Compute: this rank's share.
        self._pass_options(self.param_groups, self.inner.param_groups)
        self.pieces.step(plan.used.tolist(), **options)
        self._pass_options(self.inner.param_groups, self.param_groups)

        self._gather()
        plan.begin()

    def _gather(self) -> None:
        """Bring everyone's share of the parameters to all: launch, wait."""
        for work in start_gathering(self.buckets, self.exchange):
            work.wait()

    @torch.no_grad()
    def reload(self) -> None:
        """After masters and state were written to: take them into the parameters. A collective."""
        if self.pieces.reload():
            self._gather()
        for parameter, master in self.masters.items():
            parameter.copy_(master)

    @staticmethod
    def _pass_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for have, take in zip(source, target, strict=True):
            take.update({key: value for key, value in have.items() if key != "params"})

    def bytes_per_step(self) -> int:
        """Bytes that this rank sends in a step with one backward pass, once a first one has made the buckets.

        A reduce-scatter and an all-gather, (n - 1) / n each of every bucket, padded so that n divides it:
        what an all-reduce sends; and 2 (n - 1) / n of 8 (P + 3) for P parameters: on how many ranks each was
        used, and totals. In stage 2 each further backward pass sends all but the all-gather.
        """
        plan, ranks = self.reducer.plan, self.exchange.ranks
        if plan is None:
            raise RuntimeError("the buckets follow from the first backward pass; train a step first")
        return plan.bytes_sent() + sum(bucket.bytes_sent(ranks) for bucket in self.buckets)

    # The state of a plain optimizer of the same parameters, to save and to load.

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to rank `to` of the group, for `state_dict`. A collective.

        The other ranks send their shares to it, once.
        """
        self._consolidated = consolidated(self, to)

    def state_dict(self) -> dict[str, Any]:
        """The state as a plain optimizer of all parameters would have it.

        Raises:
            RuntimeError: `consolidate_state_dict` has not brought it to this rank since the last step.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"the state is spread over {self.exchange.ranks} ranks; let every rank call "
                "consolidate_state_dict(to) first, and rank `to` state_dict()"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a plain optimizer, or a consolidated one, of the same parameters. A collective.

        Args:
            state_dict: the same on all ranks; it may come from another number of ranks.

        Raises:
            ValueError: other groups than this optimizer's.
        """
        self._consolidated = None
        load(self, state_dict)

    def gradients(self) -> list[Tensor]:
        """This rank's share of the gradients, after `synchronize`."""
        return [bucket.reduced for bucket in self.buckets if bucket.reduced is not None]
