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

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from minidist.comm.work import Group
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.sharding.arguments import check_zero_arguments, refuse_unshareable
from minidist.parallel.sharding.reduce_to_owner import ShardPlan
from minidist.parallel.sharding.zero_partition import Partition
from minidist.parallel.sharding.zero_state import consolidated, load
from minidist.parallel.training.clipping import check_max_norm, check_norm_type, clip_factor, global_norm


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

    A second one of the same parameters replaces the first, which can make no more steps.

    Parameters become views into flat buffers in the first step; what `parameter.data = tensor` gives one
    later is taken over into them in the next step. What a step sends: `bytes_per_step`.

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
            whose state cannot be shared, or an engine or a FullyShard trains the parameters.
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
        check_zero_arguments(stage, optimizer_class, bucket_mb, master)
        self.inner = optimizer_class(params, **defaults)
        refuse_unshareable(self.inner)
        self.stage, self.group = stage, group
        super().__init__([{**group} for group in self.inner.param_groups], self.inner.defaults)
        self.partition = Partition(
            self.inner, self.param_groups, GradientComm(group), stage, bucket_mb, master
        )
        self._made = True
        self._consolidated: dict[str, Any] | None = None
        self._clipped = False  # this step's gradients are summed, and shortened

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own, that get rank 0's values. A collective.

        Raises:
            ValueError: some are there already, or differ between ranks.
        """
        super().add_param_group(param_group)
        if self._made:
            added = self.param_groups[-1]
            self.inner.add_param_group({**added})
            self.partition.add(added["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, the sums of stage 2 too."""
        self._clipped, self.partition.pieces.factor = False, 1.0
        self.partition.reducer.recover()
        if self.partition.reducer.plan is not None:
            self.partition.reducer.plan.begin()
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
        elif self.partition.reducer.pending:
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
        norm = global_norm(self.gradients(), True, self.group, norm_type) * self.partition.pieces.factor
        self.partition.pieces.factor *= clip_factor(norm, max_norm)
        return norm

    def synchronize(self) -> ShardPlan:
        """Complete this rank's share of the gradients; `step` does so itself.

        Raises:
            RuntimeError: another ZeroOptimizer has been made of the same parameters since.
        """
        if self.partition.replaced:
            raise RuntimeError(
                "this ZeroOptimizer's parameters have been given to another since, which trains them; step "
                "with that one"
            )
        self.partition.follow_changes()
        self.partition.reducer.synchronize()
        return self.partition.reducer.settled()

    @torch.no_grad()
    def update(self, **options: Any) -> None:
        """The step that follows `synchronize`; `options` are for the optimizer's own."""
        plan = self.partition.reducer.settled()
        self._consolidated = None

        # Compute: this rank's share.
        self._pass_options(self.param_groups, self.inner.param_groups)
        self.partition.pieces.step(plan.used.tolist(), **options)
        self._pass_options(self.inner.param_groups, self.param_groups)

        self.partition.gather()
        plan.begin()

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
        plan, ranks = self.partition.reducer.plan, self.partition.exchange.ranks
        if plan is None:
            raise RuntimeError("the buckets follow from the first backward pass; train a step first")
        return plan.bytes_sent() + sum(bucket.bytes_sent(ranks) for bucket in self.partition.buckets)

    # The state of a plain optimizer of the same parameters, to save and to load.

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to rank `to` of the group, for `state_dict`. A collective.

        The other ranks send their shares to it, once.
        """
        if isinstance(to, bool) or not isinstance(to, int):
            raise TypeError(f"to is {to!r}; give a rank of the group, such as 0")
        self._consolidated = consolidated(self, to)

    def state_dict(self) -> dict[str, Any]:
        """The state as a plain optimizer of all parameters would have it.

        Raises:
            RuntimeError: `consolidate_state_dict` has not brought it to this rank since the last step.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"the state is spread over {self.partition.exchange.ranks} ranks; let every rank call "
                "consolidate_state_dict(to) first, and rank `to` state_dict()"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a plain optimizer, or a consolidated one, of the same parameters. A collective.

        Args:
            state_dict: the same on all ranks; it may come from another number of ranks.

        Raises:
            TypeError: it is no state dict of an optimizer.
            ValueError: other groups than this optimizer's.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            has = f"has the keys {[*state_dict]}" if isinstance(state_dict, Mapping) else f"is {state_dict!r}"
            raise TypeError(
                f"state_dict {has}; give what an optimizer's state_dict() returned, with the keys state and "
                "param_groups"
            )
        self._consolidated = None
        load(self, state_dict)

    def gradients(self) -> list[Tensor]:
        """This rank's share of the gradients, after `synchronize`."""
        return [bucket.reduced for bucket in self.partition.buckets if bucket.reduced is not None]
