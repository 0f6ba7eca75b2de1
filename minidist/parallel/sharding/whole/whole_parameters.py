"""Parameters that are whole on every rank: their gradients are reduced as they arrive.

The first backward pass shows the order in which gradients come, and in this order parameters are dealt to
flat buckets (dealing.py). From then on a full bucket is sent while backward computes the rest (reducer.py).

Source: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.joined_messages import MB, broadcast_together
from minidist.parallel.guards.claims import BY_DATA_PARALLEL, BY_ZERO, claim, trainers
from minidist.parallel.guards.refusals import refuse_added
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.sets.equal_start import named_in, set_for, start_new_equal
from minidist.parallel.sharding.sets.parameter_set import ParameterSet, Totals
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.sharding.units.units import weakly
from minidist.parallel.sharding.whole.dealing import Dealer
from minidist.parallel.sharding.whole.reducer import Reducer

Named = Iterable[tuple[str, nn.Parameter]]


class Progress(Enum):
    """How far the gradients of a step have come on this rank."""

    OWN = "of this rank's own rows; backward passes may add to them"
    SUMMED = "sums over the ranks"
    GIVEN = "sums, and the optimizer's slices have this rank's part"


class WholeParameters(Sharded):
    """Parameters that every rank has whole; hooks on them reduce their gradients. Making it is a collective.

    This is data parallelism. `WithSharedState` below has what ZeRO 1 and 2 do otherwise.

    named: gives the parameters with their names, the same on all ranks; called again when they may have
    changed. sets: how they are shared. slices, groups: this rank's part of the optimizer, and its groups of
    whole parameters; none for a loop of data parallelism, which has an optimizer of its own. module: is
    watched for parameters that are added to its parts. group_names: see `Sharded`. broadcast_buffers: send
    rank 0's buffers of the module to all before each pass that sends gradients.
    """

    def __init__(
        self,
        named: Callable[[], Named],
        sets: Sequence[ParameterSet],
        slices: OptimizerSlices | None = None,
        *,
        groups: Sequence[dict[str, Any]] = (),
        module: nn.Module | None = None,
        group_names: Sequence[Sequence[str]] = (),
        bucket_mb: float = 25,
        overlap: bool = True,
        broadcast_buffers: bool = False,
    ) -> None:
        super().__init__(sets)
        self._named, self.groups, self.group_names = named, groups, group_names
        if module is not None:
            self.model = module
        self.slices = OptimizerSlices.none() if slices is None else slices
        self.optimizer = self.slices.optimizer
        self._overlap, self._leaves_grad = overlap, self.sets[0].leaves_grad
        self._module, self._broadcast_buffers = module, broadcast_buffers
        limit, name_of = int(bucket_mb * MB), weakly(self.name_of)
        self._dealer = Dealer(self.sets, self.slices, groups, limit, name_of, masters=module is not None)
        self.parameters = self._dealer.parameters
        self._is_alone = self.residency.whole_state and all(
            each.gradient_comm.ranks == 1 for each in self.sets
        )
        self.gradients_are = Progress.OWN
        self.reducer: Reducer | None = None  # none where this rank is alone
        self._accumulates = False  # inside `no_sync`
        self._attach()

    # Hooks, on the parameters that get gradients.

    def _attach(self) -> None:
        """Put hooks on the parameters that get gradients now; a backward pass shows how to deal them."""
        named = [*self._named()]
        self.names = {p: name for name, p in reversed(named)}
        self.set_of = {p: set_for(name, self.sets) for p, name in self.names.items()}
        self._all = [p for _, p in named]
        trained = [p for p in self._all if p.requires_grad]
        self._parts = [] if self._module is None else [*self._module.modules()]
        self._known, self._trained = set(map(id, self._all)), self._trained_now()
        self._claim(trained)
        self._dealer.number(trained, self.set_of)
        if not self._is_alone:
            self.reducer = Reducer(self._dealer, self._overlap)
            self._accumulate(self._accumulates)

    def _claim(self, trained: Sequence[nn.Parameter]) -> None:
        """Refuse others that train these parameters, and drop the buckets: all are dealt anew."""
        self._dealer.empty()
        claim(self, BY_DATA_PARALLEL, trained)

    def detach(self) -> None:
        """Take the hooks off the parameters; their gradients stay as they are."""
        if self.reducer is not None:
            self.reducer.detach()
        self.reducer = None

    def _trained_now(self) -> list[Any]:
        """Values that change where a module or parameter is added, thawed, or converted to another dtype."""
        # module.parameters() would take 0.1 ms for a small transformer, and every step looks here.
        parameters = [p for part in self._parts for p in part._parameters.values() if p is not None]
        children = [id(child) for part in self._parts for child in part._modules.values()]
        return [(id(p), p.dtype, p.device) for p in parameters if p.requires_grad] + children

    def follow_changes(self) -> None:
        """Make hooks and buckets for parameters that get gradients from now on; refuse added ones."""
        if self._trained_now() != self._trained:
            refuse_added(self._named(), self._known)
            self.reattach()

    def reattach(self) -> None:
        """Make hooks for the parameters that get gradients now; a backward pass deals them to buckets."""
        self.detach()
        self._attach()

    def name_of(self, param_index: int) -> str:
        """A parameter's name, for messages; in a loop without a module its number."""
        parameter = self.parameters[param_index]
        name = self.names[parameter]
        if self._module is None:
            return f"number {name} of params, of shape {tuple(parameter.shape)},"
        return name

    # Buckets.

    @property
    def buckets(self) -> list[Bucket[Any]]:  # type: ignore[override]
        """The buckets of all sets."""
        return [bucket for each in self.sets for bucket in each.buckets]

    @property
    def orders(self) -> list[list[int]] | None:  # type: ignore[override]
        """The orders in which parameters were dealt; None where none are."""
        return None if self._is_alone else self._dealer.orders

    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Do nothing: the first backward pass makes the buckets of data parallelism."""

    # A step: passes, gradients, and the parameters to all ranks.

    def ready(self) -> None:
        """Prepare a pass as `forward` does, for loops that call parts of the module themselves.

        It finishes a round that an error has interrupted, and follows changes of the module.
        """
        if self.reducer is not None and torch.is_grad_enabled():
            self.reducer.recover()
            self.follow_changes()
            module = self._module
            if module is not None and self._broadcast_buffers and module.training and not self._accumulates:
                broadcast_together([*module.buffers()], self.sets[0].gradient_comm.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for this rank's rows."""
        assert self._module is not None
        self.ready()
        return self._module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, whole gradients add up on this rank: for all micro-batches but the last.

        Gradients of which a rank keeps its share are sent all the same.
        """
        before = self._accumulates
        try:
            self._accumulate(True)
            yield
        finally:
            self._accumulate(before)

    def _accumulate(self, accumulates: bool) -> None:
        self._accumulates = accumulates
        if self.reducer is not None:
            is_kept = self.residency.whole_gradients
            self.reducer.syncing = not (is_kept and (accumulates or self._leaves_grad))

    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Have the next backward pass complete the round, which also sums weight and loss over the ranks."""
        super().begin_final_backward(weight, loss_sum, waits)
        if self.reducer is not None:
            self.reducer.expect(self._own, waits)

    def synchronize(self) -> tuple[float, float]:
        """Sum the gradients; returns the totals, summed over the ranks."""
        self.sum_over_ranks()
        if self.reducer is None:
            return float(self._own.weight), float(self._own.loss)
        weight, loss = self.sets[0].totals.tolist()
        return weight, loss

    def sum_over_ranks(self) -> None:
        """Make sure that rounds have summed the gradients that came. A collective."""
        if self.reducer is not None:
            self.reducer.finish_round()
        self.gradients_are = Progress.SUMMED

    def complete(self) -> None:
        """Sum the gradients and give the slices their part, unless that is done. A collective."""
        if self.gradients_are is Progress.OWN:
            self.sum_over_ranks()
        elif self.reducer is not None and self.reducer.pending:
            raise RuntimeError("gradients came after clip_grad_norm; call it after the last backward()")
        self.gradients()

    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums, which the slices get now if they have not."""
        if self.gradients_are is Progress.SUMMED:
            self.slices.give_gradients(self._users())
            self.gradients_are = Progress.GIVEN
        return self.slices.gradients()

    def _users(self) -> dict[int, float]:
        """On how many ranks each parameter had a gradient, for slices that are shares."""
        return {}

    def update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's slices and publish them."""

        def use_gradients() -> None:
            self.complete()
            self.gradients_are = Progress.OWN

        loss = self.slices.update(use_gradients, self.publish, closure, **options)
        self.slices.drop_gradients()
        return loss

    def forget(self) -> None:
        """Forget the gradients of a step, and their sums."""
        self.forget_sums()
        for parameter in self._all:
            parameter.grad = None

    def forget_sums(self) -> None:
        """Forget the sums of a step's gradients."""
        self.gradients_are = Progress.OWN
        self.slices.drop_gradients()

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients; with `kept` also what compression has kept back of them."""
        if self.slices.master is not None and not kept:
            for gradient in self.gradients():  # of the masters
                gradient.mul_(factor)
            return
        if self.reducer is not None:
            for param_set in self.sets:
                param_set.rescale(factor, kept)
        else:  # this rank is alone
            for parameter in self._all:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self.gradients_are is Progress.GIVEN:
            self.slices.give_whole_gradients()  # masters take theirs anew

    def publish(self) -> None:
        """Write masters, rounded, into the parameters; all-gather the buckets, if a rank has shares."""
        self.slices.round_masters()
        buckets = self.value_buckets()
        for bucket in buckets:  # launch
            bucket.values.gather(blocking=bucket is buckets[-1])
        for bucket in buckets:  # wait
            bucket.values.wait()

    def resident(self) -> list[Tensor]:
        """The parameters, whole."""
        return [*self._all]

    def bytes_per_step(self, passes: int = 1) -> int:
        """Bytes that this rank sends in a step of so many passes, once a first one has made the buckets.

        Data parallelism sends 2 (n - 1) / n of the bytes of each bucket, compressed or not, and of P + 2
        counts for P parameters. ZeRO sends (n - 1) / n twice, by a reduce-scatter and an all-gather of every
        bucket, padded so that n divides it; and for the counts of ranks that used each parameter, and totals,
        2 (n - 1) / n of 8 (P + 3) bytes. With ZeRO 2 each further backward pass sends all but the all-gather.
        Sparse gradients, rows and buffers come on top.
        """
        if self.reducer is not None and self.reducer.queue is None:
            raise RuntimeError("the buckets follow from the first backward pass; train a step first")
        sent = sum(bucket.layout.gather_bytes() for bucket in self.value_buckets())
        if self.reducer is not None:
            sent += self.residency.reductions(passes) * sum(each.bytes_sent() for each in self.sets)
        return sent


class WithSharedState(WholeParameters):
    """Whole parameters of which each rank keeps a share of the optimizer's state: ZeRO 1 and 2.

    Buckets hold the parameters' values, too, so they stay as they were dealt. A parameter that gets gradients
    later is dealt to a new one.
    """

    replaced = False  # another object has taken the same parameters

    @classmethod
    def of_groups(
        cls,
        groups: list[dict[str, Any]],
        param_set: ParameterSet,
        slices: OptimizerSlices,
        bucket_mb: float,
    ) -> WithSharedState:
        """Share the parameters in an optimizer's groups, in a loop, from rank 0's values on."""
        start_new_equal(named_in(groups), param_set)
        named = partial(named_in, groups)  # no method of a face: hooks would keep it alive
        return cls(named, [param_set], slices, groups=groups, bucket_mb=bucket_mb)

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Share parameters that the last group now has, too, from rank 0's values on. A collective."""
        start_new_equal(named_in(self.groups)[-len(parameters) :], self.sets[0])
        self.reattach()

    def _claim(self, trained: Sequence[nn.Parameter]) -> None:
        """Take the parameters over from a `ZeroOptimizer` that shared them before."""
        self._hooked = set(map(id, trained))
        for other in trainers(self._all, BY_ZERO):
            if other is not self:
                other.detach()
                other.replaced = True
        claim(self, BY_ZERO, self._all)

    def follow_changes(self) -> None:
        """Make hooks and buckets for parameters that get gradients from now on; refuse reassigned data."""
        for bucket in self.buckets:
            bucket.values.refuse_reassigned()
        if any(p.requires_grad and id(p) not in self._hooked for p in self._all):
            self.reattach()

    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Make the buckets in the saved order, if there are none; saved: names with optimizer state."""
        self.follow_changes()
        had = {*saved, *(name for each in order or () for name in each)}
        frozen = [p for name, p in self._named() if name in had]
        if self._dealer.number(frozen, self.set_of):  # the optimizer has state of them
            self.reattach()
        if self.buckets:
            return
        self._dealer.deal_saved(order)
        if self.reducer is not None and self.buckets and not self._dealer.undealt():
            self.reducer.settle()

    def synchronize(self) -> tuple[float, float]:
        """Sum the gradients; returns the totals, summed over the ranks.

        Where every backward pass is a round, ranks may have had different numbers of them: each takes part in
        the others' until it was the last one for all (`Totals.last_passes`).
        """
        self.sum_over_ranks()
        while self.reducer is not None and not (self.residency.whole_gradients or self.sets[0].was_last_pass):
            self.reducer.expect(Totals(last_passes=1.0))
            self.reducer.finish_round()
        weight, loss = self.sets[0].totals.tolist()
        return weight, loss

    def sum_over_ranks(self) -> None:
        """Make sure that rounds have summed the gradients that came. A collective."""
        if self.replaced:
            raise RuntimeError(
                "this ZeroOptimizer's parameters have been given to another since; step with that one"
            )
        self.follow_changes()
        super().sum_over_ranks()

    def _users(self) -> dict[int, float]:
        users: dict[int, float] = {}
        for param_set in self.sets:
            users.update(zip(param_set.indices, param_set.users.tolist(), strict=True))
        return users

    def update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's slices and publish them; forget the sums that this has used."""
        loss = super().update(closure, **options)
        for param_set in self.sets:
            param_set.begin()
            if not self._leaves_grad:
                for index in param_set.indices:
                    self.parameters[index].grad = None  # sums in one part, its own in the others
        return loss

    def forget_sums(self) -> None:
        """Forget the sums of a step's gradients; the next round begins them anew."""
        super().forget_sums()
        if self.reducer is not None:
            self.reducer.recover()
        for param_set in self.sets:
            param_set.begin()

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients of this rank's shares; no compression keeps any back."""
        for gradient in self.gradients():
            gradient.mul_(factor)
