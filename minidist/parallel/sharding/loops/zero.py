"""ZeRO, stages 1 and 2, for a loop of one's own: each rank keeps the optimizer's state only for its share.

A reduce-scatter brings a rank its n-th of the gradients, summed; it updates that n-th of the parameters, and
an all-gather publishes everyone's. An all-reduce consists of just these two, so a step sends what data
parallelism sends. Stage 2 reduces gradients while backward runs, and keeps only its share of them. The
reduce-scatter is `GradientsToOwners.reduce` (flat/gradients.py), the all-gather `WholeValues.gather`.

Source: Rajbhandari et al. 2020, "ZeRO", sections 5.1, 5.2 and 7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from minidist.comm.work import Group
from minidist.parallel.contract.residency import ROWS
from minidist.parallel.contract.training_state import copy_options
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.guards.refusals import require_optimizer
from minidist.parallel.sharding.loops.consolidated_state import ConsolidatedState
from minidist.parallel.sharding.loops.loop_classes import check_zero_arguments, delegated
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.optimizer.parameter_groups import same_options
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.whole.whole_parameters import WithSharedState
from minidist.parallel.training.elementwise_optimizers import refuse_unshareable
from minidist.parallel.training.master_weights import own_attribute


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is spread over the ranks; used as torch's ZeroRedundancyOptimizer is.

    >>> optimizer = md.ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    >>> cross_entropy(model(inputs), targets).backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()

    Making it sends rank 0's parameters to all. All ranks call `step`, which averages the gradients: the model
    needs no `DataParallel`, which must not be used in stage 2. The result is that of `optimizer_class` in one
    process, to rounding. An elementwise optimizer of torch's (`elementwise_optimizers.ELEMENTWISE`)
    updates an equal share on each rank; with any other, a rank updates whole parameters. A method of the
    optimizer's own, such as a schedule-free one's `train`, is a collective: it publishes too. A second
    ZeroOptimizer of the same parameters replaces the first, which can make no more steps.

    Stage 1 leaves `grad` as backward left it. Stage 2 sums gradients over the ranks in each backward pass,
    sets `grad` to None, and adds the sums up in the owner's share until a step or `zero_grad`; all ranks make
    as many backward passes. The first one, which shows the order of the gradients, holds all of them. In the
    first step parameters become views into flat buckets, and `parameter.data = tensor` is refused.

    Args:
        params: parameters, or dicts with parameters and options of their own; the same on all ranks.
        optimizer_class: a class of torch's, or a function from parameters and `defaults` to an optimizer.
        stage: 1 to share the optimizer's state, 2 to share the gradients too.
        group: the ranks that share; None for all.
        bucket_mb: largest size of a bucket in MB (2^20 bytes). In stage 2 two buckets have memory at a time.
        master: the dtype of updates, if it is not the parameters': the rank keeps its share in it as well.
        defaults: options of the optimizer.

    Raises TypeError or ValueError if an argument is wrong, the ranks' parameters differ, the optimizer's
    state cannot be shared, or an engine or a FullyShard trains the parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        stage: int = 1,
        group: Group | GradientComm = None,
        *,
        bucket_mb: float = 25,
        master: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        check_zero_arguments(stage, optimizer_class, bucket_mb, master)
        self.inner = optimizer_class(params, **defaults)
        require_optimizer(self.inner, "optimizer_class")
        refuse_unshareable(type(self.inner))
        row = ROWS[stage]
        param_set = ParameterSet(row, GradientComm.over(group), leaves_grad=row.whole_gradients)
        self.stage, self.group = stage, param_set.gradient_comm.group
        super().__init__([{**group} for group in self.inner.param_groups], self.inner.defaults)
        slices = OptimizerSlices(self.inner, master)
        self.shared = WithSharedState.of_groups(self.param_groups, param_set, slices, bucket_mb)
        self._consolidated = ConsolidatedState(self.shared)

    clip_grad_norm = delegated("shared", WithSharedState.clip_grad_norm)
    publish = delegated("shared", WithSharedState.publish)
    synchronize = delegated("shared", WithSharedState.sum_over_ranks)
    bytes_per_step = delegated("shared", WithSharedState.bytes_per_step)
    consolidate_state_dict = delegated("_consolidated", ConsolidatedState.collect)
    state_dict = delegated("_consolidated", ConsolidatedState.read)
    load_state_dict = delegated("_consolidated", ConsolidatedState.load)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; they get rank 0's values. A collective."""
        super().add_param_group({**param_group})
        if hasattr(self, "shared"):  # torch's own __init__ calls this too
            added, given = self.param_groups[-1], {*param_group, "param_names"}
            self.inner.add_param_group({key: added[key] for key in added if key in given})
            copy_options(self.inner.param_groups[-1:], [added])
            self.shared.add(added["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and in stage 2 their sums."""
        self.shared.forget_sums()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Sum the gradients over the ranks, update this rank's share, and publish it. A collective.

        closure: computes the loss, which is returned, and its gradients anew; each call but the first then
        also sends the all-gather. options: further arguments of the optimizer's own `step`.
        """
        self._consolidated.forget()
        mine, its = self.param_groups, self.inner.param_groups
        closure = closure and same_options(its, mine)(closure)  # which may change some
        with same_options(mine, its):
            return self.shared.update(closure, **options)

    def __getattr__(self, name: str) -> Any:
        if "shared" not in vars(self):  # torch's own __init__ asks
            raise AttributeError(name)
        copy_options(self.param_groups, self.inner.param_groups)

        def after() -> None:
            copy_options(self.inner.param_groups, self.param_groups)
            self.publish()

        return own_attribute(self.inner, name, after)
