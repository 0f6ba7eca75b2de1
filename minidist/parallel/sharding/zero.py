"""ZeRO, stages 1 and 2, for a loop of one's own: each rank keeps the optimizer's state only for its share.

A rank updates only the n-th of the parameters that it owns: a reduce-scatter brings it that share of the
gradients, summed; it updates the share; an all-gather publishes everyone's shares. An all-reduce consists of
just these two, so a step sends what data parallelism sends. Stage 2 reduces gradients while backward runs,
and keeps only its share of them: `Bucket.give_back` (flat/buckets.py) lets go of the rest.
whole_parameters.py does the work; the table in contract/residency.py says who keeps what.

Source: Rajbhandari et al. 2020, "ZeRO", sections 5.1, 5.2 and 7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from minidist.comm.work import Group
from minidist.parallel.contract.residency import ROWS
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.guards.refusals import require_optimizer
from minidist.parallel.sharding.consolidated_state import consolidated, load_consolidated
from minidist.parallel.sharding.loop_arguments import check_zero_arguments
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.parameter_groups import copy_options
from minidist.parallel.sharding.parameter_set import ParameterSet
from minidist.parallel.sharding.whole_parameters import WholeParameters, named_in, start_new_equal
from minidist.parallel.training.elementwise_optimizers import refuse_unshareable
from minidist.parallel.training.master_weights import own_attribute


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is spread over the ranks; used as torch's ZeroRedundancyOptimizer is.

    >>> optimizer = md.ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    >>> loss = cross_entropy(model(inputs), targets)
    >>> loss.backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()

    Making it sends rank 0's parameters to all. All ranks call `step`, which averages the gradients over the
    ranks itself: the model needs no `DataParallel`, which must not be used in stage 2. The result is that of
    `optimizer_class` in one process, to rounding. An elementwise optimizer of torch's
    (`elementwise_optimizers.ELEMENTWISE`) updates a share of equal size on each rank; with any other, such as
    Adafactor, Muon or your own, a rank updates whole parameters. A second ZeroOptimizer of the same
    parameters replaces the first, which can make no more steps.

    Stage 1 leaves `grad` as backward left it. Stage 2 sums gradients over the ranks in each backward pass,
    sets `grad` to None, and adds the sums up in the owner's share until a step or `zero_grad`; all ranks make
    as many backward passes. The first one, which shows the order of the gradients, holds all of them.

    A method of the optimizer's own, such as a schedule-free one's `train`, is a collective: it publishes too.

    In the first step parameters become views into flat buckets. Write into one (`with torch.no_grad():
    parameter.copy_(tensor)`); `parameter.data = tensor` is refused. `bytes_per_step` says what a step sends.

    Args:
        params: parameters, or dicts with parameters and options of their own; the same on all ranks.
        optimizer_class: a class of torch's, or another function from parameters and `defaults` to an
            optimizer.
        stage: 1 to share the optimizer's state, 2 to share the gradients too.
        group: the ranks that share; None for all.
        bucket_mb: largest size of a bucket in MB (2^20 bytes). In stage 2 two buckets have memory at a time.
        master: the dtype in which parameters are updated, if it is not their own: the rank then also keeps
            its share of them in this dtype.
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
        own = ParameterSet(ROWS[stage], GradientComm.over(group))
        self.stage, self.group = stage, own.gradient_comm.group
        super().__init__([{**group} for group in self.inner.param_groups], self.inner.defaults)
        start_new_equal(named_in(self.param_groups), own)
        self.shared = WholeParameters(
            partial(named_in, self.param_groups),  # not a method: hooks would keep this alive
            [own],
            OptimizerSlices(self.inner, master),
            groups=self.param_groups,
            bucket_mb=bucket_mb,
            leaves_grad=own.residency.gradients,
        )
        self._consolidated: dict[str, Any] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; they get rank 0's values. A collective."""
        super().add_param_group({**param_group})
        if hasattr(self, "shared"):  # torch's own __init__ calls this too
            own, given = self.param_groups[-1], {*param_group, "param_names"}
            self.inner.add_param_group({key: own[key] for key in own if key in given})
            own.update({key: v for key, v in self.inner.param_groups[-1].items() if key != "params"})
            added = len(own["params"])
            start_new_equal(named_in(self.param_groups)[-added:], self.shared.sets[0])
            self.shared.reattach()

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
        self._consolidated = None
        mine, its = self.param_groups, self.inner.param_groups

        def evaluate() -> Any:
            copy_options(its, mine)
            loss = closure() if closure is not None else None
            copy_options(mine, its)  # the closure may have changed some
            return loss

        copy_options(mine, its)
        loss = self.shared.update(evaluate if closure is not None else None, **options)
        copy_options(its, mine)
        return loss

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """What `torch.nn.utils.clip_grad_norm_` does in one process, but for `grad`; before `step`.

        A collective: it sums the gradients, so that `step` need not, and sends 2 (n - 1) / n 8 bytes more.
        norm_type: the p of the p-norm, above 0, or `math.inf`. Returns the norm before.
        """
        return self.shared.clip_grad_norm(max_norm, norm_type)

    def synchronize(self) -> None:
        """Complete this rank's share of the gradients for the next `step`, which does it otherwise."""
        self.shared.sum_over_ranks()

    def publish(self) -> None:
        """Bring everyone's share of the parameters to all. A collective."""
        self.shared.publish()

    def bytes_per_step(self) -> int:
        """Bytes that this rank sends in a step with one backward pass, once a first one has made the buckets.

        A reduce-scatter and an all-gather send (n - 1) / n each of every bucket, padded so that n divides it;
        the counts of ranks that used each of P parameters, and totals, 2 (n - 1) / n of 8 (P + 3). In stage 2
        each further backward pass sends all but the all-gather.
        """
        return self.shared.bytes_per_step()

    def __getattr__(self, name: str) -> Any:
        if "shared" not in vars(self):  # torch's own __init__ asks
            raise AttributeError(name)
        copy_options(self.param_groups, self.inner.param_groups)

        def after() -> None:
            copy_options(self.inner.param_groups, self.param_groups)
            self.publish()

        return own_attribute(self.inner, name, after)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state at rank `to` of the group: the others send their shares. A collective."""
        self._consolidated = consolidated(self.shared, to)

    def state_dict(self) -> dict[str, Any]:
        """The state of a plain optimizer of all parameters, after `consolidate_state_dict` to this rank."""
        if self._consolidated is None:
            raise RuntimeError(
                f"the state is spread over {self.shared.sets[0].gradient_comm.ranks} ranks; let every rank "
                "call consolidate_state_dict(to) first, and rank `to` state_dict()"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a plain optimizer, or a consolidated one, of the same parameters. A collective.

        state_dict: the same on all ranks; it may come from another number of ranks.
        """
        load_consolidated(self.shared, state_dict)
        self._consolidated = None
