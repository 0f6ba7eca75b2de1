"""Parameters that are whole on every rank: their gradients are reduced as they arrive.

The first backward pass shows the order in which gradients come. In this order parameters are dealt to flat
buckets (flat/buckets.py). Registration order is only a guess at it, and ranks may see different orders: if
their buckets differed, they would add up gradients of different parameters. So rank 0's order holds for all.

Where the optimizer's state is shared, a bucket also holds the parameters' values, cut into one share for each
rank, and this rank's share goes to its slices (optimizer_slices.py). Parameters that get gradients only
later, because they were frozen or not there, are dealt to further buckets; the buckets before stay, with
their state. Where the state is whole, buckets hold nothing between steps, so all parameters are dealt anew.

Sources: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), section 3.2.3; Rajbhandari et al. 2020,
"ZeRO" (see zero.py), sections 5.1 (the optimizer's state in equal parts) and 5.2 (gradients in buckets, one
part each).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.compression.compressor import Compression
from minidist.parallel.flat.buckets import Bucket, GradientComm
from minidist.parallel.flat.joined_messages import MB, broadcast_together, require_same
from minidist.parallel.guards.ownership import BY_DATA_PARALLEL, BY_ZERO, claim, require_free, trainers
from minidist.parallel.guards.refusals import refuse_meta
from minidist.parallel.sharding.all_parameters import AllParameters
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.parameter_set import (
    ParameterSet,
    set_for,
    shared_tensors,
)
from minidist.parallel.sharding.reducer import Reducer
from minidist.parallel.sharding.units import weakly
from minidist.parallel.training.clipping import guard
from minidist.parallel.training.elementwise_optimizers import work_of

Named = Iterable[tuple[str, nn.Parameter]]


class Gradients(Enum):
    """How far the gradients of a step have come on this rank."""

    OWN = "of this rank's own rows; backward passes may add to them"
    SUMMED = "sums over the ranks"
    GIVEN = "sums, and the optimizer's slices have this rank's part"


class WholeParameters(AllParameters):
    """Parameters that every rank has whole; hooks on them reduce their gradients. Making it is a collective.

    named: gives the parameters with their names, the same on all ranks; called again when they may have
    changed. sets: how they are shared. slices, groups: this rank's part of the optimizer, and its groups of
    whole parameters; none for a loop of data parallelism, which has an optimizer of its own. module: is
    watched for parameters that are added to its parts. average: gradients become means over the ranks, and
    not sums. leaves_grad: see `ParameterSet`. broadcast_buffers: send rank 0's buffers of the module to all
    before each pass that sends gradients.
    """

    def __init__(
        self,
        named: Callable[[], Named],
        sets: Sequence[ParameterSet],
        slices: OptimizerSlices | None = None,
        *,
        groups: Sequence[dict[str, Any]] = (),
        module: nn.Module | None = None,
        bucket_mb: float = 25,
        overlap: bool = True,
        compression: Compression | None = None,
        average: bool = True,
        leaves_grad: bool = False,
        broadcast_buffers: bool = False,
    ) -> None:
        self._named, self.sets, self.groups = named, [*sets], groups
        self.slices = OptimizerSlices.none() if slices is None else slices
        self._bucket_bytes, self._overlap, self._leaves_grad = int(bucket_mb * MB), overlap, leaves_grad
        self._module, self._broadcast_buffers = module, broadcast_buffers
        for own in self.sets:
            is_sent = own.names is None or own.gradient_comm.ranks > 1  # experts may be on one rank alone
            own.leaves_grad, own.compression = leaves_grad, compression if is_sent else None
            if average and own.residency.state:
                own.scale = 1 / own.gradient_comm.ranks
            elif average:  # a reduction to owners takes the mean itself
                own.op = "mean"
            if not own.residency.state:
                own.total_count = 3  # see `begin_final_backward`
        self._state_shared = [own for own in self.sets if not own.residency.state]
        self._state_whole = [own for own in self.sets if own.residency.state]
        self.parameters: list[nn.Parameter] = []  # get gradients, or did; parameter indices number this list
        self.orders, self.undealt_masters, self.on_owners = [], {}, []
        self.gradients_are = Gradients.OWN
        self.replaced = False  # another object has taken the same parameters
        self.reducers: list[Reducer] = []  # none where this rank is alone
        self._accumulates = False  # inside `no_sync`
        self._own: tuple[float | Tensor, float | Tensor] = (0.0, 0.0)  # this rank's totals
        self._weight: float | Tensor | None = None  # of the losses since the last `average`
        self._attach()

    @classmethod
    def of_loop(cls, module: nn.Module, own: ParameterSet, **options: Any) -> WholeParameters:
        """Share a module's parameters in a loop that has an optimizer of its own, from rank 0's values on."""
        refuse_meta("module", [*module.named_parameters(), *module.named_buffers()])
        start_equal(module, [own])
        return cls(module.named_parameters, [own], module=module, **options)

    # Hooks, on the parameters that get gradients.

    def _attach(self) -> None:
        """Put hooks on the parameters that get gradients now; a backward pass shows how to deal them."""
        named = [*self._named()]
        self._names: dict[Tensor, str] = {p: name for name, p in reversed(named)}
        self.set_of = {p: set_for(name, self.sets) for p, name in self._names.items()}
        self._all = [p for _, p in named]
        trained = [p for p in self._all if p.requires_grad]
        self._parts = [] if self._module is None else [*self._module.modules()]
        self._known, self._trained = set(map(id, self._all)), self._trained_now()
        for own in self._state_whole:
            own.empty()
        if self._state_shared:
            values = [p for p in self._all if self.set_of[p] in self._state_shared]
            self._hooked = set(map(id, trained))
            guard(values, weakly(self._why_not_clipped))
            self._replace_others(values)
        else:
            self.parameters, self.orders = [], []
        claim(self, BY_DATA_PARALLEL, [p for p in trained if self.set_of[p] in self._state_whole])
        self._number(trained)
        if all(own.residency.state and own.gradient_comm.ranks == 1 for own in self.sets):
            self.orders = None
            return
        listed = [(self.name_of(index), p) for index, p in enumerate(self.parameters)]
        in_shares = [own for own in self.sets if not own.residency.gradients]
        whole = [own for own in self.sets if own.residency.gradients]
        for sets in (in_shares, whole):
            # Sums of every pass come first. Whole gradients wait for them, so that all ranks keep one order.
            overlap = self._overlap and (sets is in_shares or not in_shares)
            if sets:
                deal = weakly(self._first_round, sets)
                self.reducers.append(Reducer(listed, sets, overlap, deal))
        self._accumulate(self._accumulates)

    def _number(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Number parameters that have no index yet; returns whether there are any."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        count, placed = len(numbers), {index for own in self.sets for index in own.indices}
        for parameter in parameters:
            if id(parameter) not in numbers:
                numbers[id(parameter)] = len(numbers)
                self.parameters.append(parameter)
            if numbers[id(parameter)] not in placed:
                self.set_of[parameter].indices.append(numbers[id(parameter)])
        return len(numbers) > count

    def detach(self) -> None:
        """Take the hooks off the parameters; their gradients stay as they are."""
        for reducer in self.reducers:
            reducer.detach()
        self.reducers = []

    def _replace_others(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take parameters from an object with shared state that this one replaces."""
        for other in trainers(parameters, BY_ZERO):
            if other is not self:
                other.detach()
                other.replaced = True
        claim(self, BY_ZERO, parameters)

    def _why_not_clipped(self, whole: bool) -> str:
        """Why `clip_grad_norm` refuses the gradients on this rank."""
        return "parameters has some of a ZeroOptimizer, whose gradients here are not the sums it will use"

    def _trained_now(self) -> list[Any]:
        """Values that change where a module or parameter is added, thawed, or converted to another dtype."""
        # module.parameters() would take 0.1 ms for a small transformer, and every step looks here.
        parameters = [p for part in self._parts for p in part._parameters.values() if p is not None]
        children = [id(child) for part in self._parts for child in part._modules.values()]
        return [(id(p), p.dtype, p.device) for p in parameters if p.requires_grad] + children

    def follow_changes(self) -> None:
        """Make hooks and buckets for parameters that get gradients from now on; refuse reassigned data."""
        for bucket in self.value_buckets():
            bucket.refuse_reassigned()
        if self._state_whole:
            if self._trained_now() != self._trained:
                self._require_known()
                self.reattach()
        elif any(p.requires_grad and id(p) not in self._hooked for p in self._all):
            self.reattach()

    def _require_known(self) -> None:
        for name, parameter in self._named():
            if id(parameter) not in self._known:
                raise ValueError(
                    f"the parameter {name} was added after the DataParallel was made, which would not "
                    "synchronize it; del it, and make a new DataParallel of the module"
                )

    def reattach(self) -> None:
        """Make hooks for the parameters that get gradients now; a backward pass deals them to buckets."""
        self.detach()
        self._attach()

    def name_of(self, param_index: int) -> str:
        """A parameter's name, for messages; in a loop without a module its number."""
        parameter = self.parameters[param_index]
        name = self._names[parameter]
        if self._module is None:
            return f"number {name} of params, of shape {tuple(parameter.shape)},"
        return name

    # Dealing: to buckets, in the order of a backward pass.

    @property
    def buckets(self) -> list[Bucket]:  # type: ignore[override]
        """The buckets of all sets."""
        return [bucket for own in self.sets for bucket in own.buckets]

    def value_buckets(self) -> list[Bucket]:
        """Those that hold parameters' values."""
        return [bucket for own in self._state_shared for bucket in own.buckets]

    @property
    def undealt(self) -> list[int]:  # type: ignore[override]
        """The indices of parameters that are in no bucket yet, where buckets have the state."""
        dealt = {index for bucket in self.value_buckets() for index in bucket.param_indices}
        return sorted({index for own in self._state_shared for index in own.indices} - dealt)

    def _first_round(
        self, sets: Sequence[ParameterSet], seen: Iterable[int]
    ) -> list[tuple[ParameterSet, Bucket]]:
        """Deal the sets' parameters that are in no bucket, and make room for a round. A collective."""
        over, count = self.sets[0].gradient_comm, len(self.parameters)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        for own in sets:
            if own.gradient_comm.ranks > 1:
                named = [(self.name_of(index), self.parameters[index]) for index in own.indices]
                require_same("parameters", named, own.gradient_comm.group)
        numbers = {index: number for number, own in enumerate(self.sets) for index in own.indices}
        if len(self.sets) > 1:  # names may differ between ranks, but each rank needs the same sets in order
            placed = [(str(numbers[index]), self.parameters[index]) for index in sorted(numbers)]
            require_same("sets of parameters", placed, over.group)
        order, sparse = agree_on_order([*seen], count, over, device), list[int]()
        if any(own.residency.state for own in sets):  # then every rank gets the rows of sparse gradients
            grads = [p.grad for p in self.parameters]
            is_sparse = torch.tensor([int(g is not None and g.is_sparse) for g in grads], device=device)
            anywhere = comm.all_reduce(is_sparse, "max", group=over.group).tolist()
            sparse = [index for index, found in enumerate(anywhere) if found]
        self._deal(sets, order, sparse)
        for own in sets:
            own.make_room(self.parameters, sparse)
        when = {index: at for at, index in enumerate(i for each in self.orders or () for i in each)}
        pairs = [(own, bucket) for own in sets for bucket in own.buckets]
        return sorted(pairs, key=lambda pair: max(when[index] for index in pair[1].param_indices))

    def _deal(self, sets: Sequence[ParameterSet], seen: Iterable[int], sparse: Collection[int] = ()) -> None:
        """Make buckets, with loaded state, for parameters of the sets that are in none. A collective."""
        dealt = {index for own in sets for bucket in own.buckets for index in bucket.param_indices}
        mine = {index for own in sets for index in own.indices}
        order = [index for index in seen if index in mine and index not in dealt]
        number_of = {id(p): number for number, group in enumerate(self.groups) for p in group["params"]}
        numbers = {index: number_of.get(id(parameter)) for index, parameter in enumerate(self.parameters)}
        group_of = {index: number for index, number in numbers.items() if number is not None}
        if order and self.orders is not None:
            self.orders.append(order)
        for own in sets:
            indices = set(own.indices)
            part = [index for index in order if index in indices]
            if own.residency.state:
                part = [index for index in part if index not in sparse]
            name_of, new = weakly(self.name_of), list[Bucket]()
            for is_cut in (True, False):
                work = None if is_cut else work_of(type(self.slices.optimizer))
                chosen = [i for i in part if self.slices.may_cut(group_of.get(i)) == is_cut]
                new += own.deal(self.parameters, chosen, self._bucket_bytes, work, name_of)
            if not own.residency.state:
                self._move_state(new, part, group_of)

    def _move_state(self, new: Sequence[Bucket], order: Sequence[int], group_of: Mapping[int, int]) -> None:
        """Make slices of new buckets, with the masters and the state that whole parameters had."""
        whole = self.slices.optimizer.state
        states = {i: whole.pop(self.parameters[i]) for i in order if self.parameters[i] in whole}
        for bucket in new:
            self.slices.add(bucket, group_of)
        masters = {i: self.undealt_masters.pop(self.parameters[i], None) for i in order}
        for each, span, tensor, _ in self.slices.by_parameter():
            if each.bucket in new and (master := masters[span.param_index]) is not None:
                tensor.copy_(master.reshape(-1)[span.start : span.stop])
        if states:
            self.slices.load_whole_states(states)

    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Make the buckets in the saved order: in another one, sums would add up in another order.

        If a run saved no order, take that of registration, reversed.
        """
        if not self._state_shared:
            return
        self.follow_changes()
        had = {*saved, *(name for each in order or () for name in each)}
        frozen = [p for name, p in self._named() if name in had and self.set_of[p] in self._state_shared]
        if self._number(frozen):  # the optimizer has state of them, although they get no gradients now
            self.reattach()
        if self.value_buckets():
            return
        index_of = {self.name_of(index): index for index in range(len(self.parameters))}
        for each in [[*reversed(index_of)]] if order is None else order:
            self._deal(self._state_shared, [index_of[name] for name in each if name in index_of])
        if self.value_buckets() and not self.undealt:
            for reducer in self.reducers:
                if not {*reducer.sets} & {*self._state_whole}:
                    reducer.settle()

    # A step: passes, gradients, and the parameters to all ranks.

    def ready(self) -> None:
        """Prepare a forward pass: finish a round that an error has interrupted, and follow changes."""
        if self.reducers and torch.is_grad_enabled():
            for reducer in self.reducers:
                reducer.recover()
            self.follow_changes()
            module = self._module
            if module is not None and self._broadcast_buffers and module.training and not self._accumulates:
                broadcast_together([*module.buffers()], self.sets[0].gradient_comm.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's rows."""
        assert self._module is not None
        self.ready()
        return self._module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients that the residency keeps whole add up on this rank, and are not sent."""
        before = self._accumulates
        try:
            self._accumulate(True)
            yield
        finally:
            self._accumulate(before)

    def _accumulate(self, accumulates: bool) -> None:
        self._accumulates = accumulates
        for reducer in self.reducers:
            is_kept = reducer.sets[0].residency.gradients
            reducer.syncing = not (is_kept and (accumulates or self._leaves_grad))

    def begin_final_backward(self, totals: tuple[float | Tensor, float | Tensor], waits: bool) -> None:
        """Have the next backward pass complete the round, which also sums `totals` over the ranks.

        Where the state is shared, a third total counts the ranks for which this is the step's last pass.
        """
        self._own = totals
        for reducer in self.reducers:
            reducer.totals, reducer.waits = (*totals, 1.0), waits

    def synchronize(self) -> tuple[float, float]:
        """Sum the gradients; returns the totals, summed over the ranks.

        Where every backward pass is a round, ranks may have had different numbers of them: each takes part in
        the others' until it was the last one for all.
        """
        self.sum_over_ranks(of_all_passes=True)
        if not self.reducers:
            weight, loss = map(float, self._own)
            return weight, loss
        first = self.sets[0]
        weight, loss = (first.sums if first.residency.state else first.totals).tolist()
        return weight, loss

    def sum_over_ranks(self, of_all_passes: bool = False) -> None:
        """Make sure that rounds have summed the gradients that came. A collective.

        of_all_passes: take part until it was the last pass for all ranks.
        """
        if self.replaced:
            raise RuntimeError(
                "this ZeroOptimizer's parameters have been given to another since; step with that one"
            )
        if self._state_shared:
            self.follow_changes()
        for reducer in self.reducers:
            reducer.finish_round()
            own = reducer.sets[0]
            while of_all_passes and not own.residency.gradients and own.sums[2] < own.gradient_comm.ranks:
                reducer.totals = (0.0, 0.0, 1.0)
                reducer.finish_round()
        self.gradients_are = Gradients.SUMMED

    def complete(self) -> None:
        """Sum the gradients and give the slices their part, unless that is done. A collective."""
        if self.gradients_are is Gradients.OWN:
            self.sum_over_ranks()
        elif any(reducer.pending for reducer in self.reducers):
            raise RuntimeError("gradients came after clip_grad_norm; call it after the last backward()")
        self.gradients()

    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums, which the slices get now if they have not."""
        if self.gradients_are is Gradients.SUMMED:
            users: dict[int, float] = {}
            for own in self._state_shared:
                users.update(zip(own.indices, own.users.tolist(), strict=True))
            self.slices.give_gradients(users)
            self.gradients_are = Gradients.GIVEN
        return self.slices.gradients()

    def update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's slices and publish them; forget the sums that this has used."""

        def use_gradients() -> None:
            self.complete()
            self.gradients_are = Gradients.OWN

        loss = self.slices.update(use_gradients, self.publish, closure, **options)
        self.slices.drop_gradients()
        for own in self._state_shared:
            own.begin()
            for index in own.indices if not self._leaves_grad else ():
                self.parameters[index].grad = None  # sums in one part, its own gradients in the others
        return loss

    def forget(self) -> None:
        """Forget the gradients of a step, and their sums."""
        self.forget_sums()
        for parameter in self._all:
            parameter.grad = None

    def forget_sums(self) -> None:
        """Forget the sums of a step's gradients."""
        self.gradients_are = Gradients.OWN
        self.slices.drop_gradients()
        for reducer in self.reducers if self._state_shared else ():
            reducer.recover()
        for own in self._state_shared:
            own.begin()

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients; with `kept` also what compression has kept back of them."""
        exact = not kept and self.slices.master is not None  # in the masters' precision
        if not exact:
            for own in self._state_whole:
                own.rescale(factor, kept)
            for parameter in self._all if not self.reducers else ():  # which are in no bucket
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            if self.gradients_are is Gradients.GIVEN:
                self.slices.give_whole_gradients()  # masters take theirs anew
        if exact or self._state_shared:
            self.gradients()
        given = [each.tensor.grad for each in self.slices.all if exact or each.bucket is not None]
        for gradient in given:
            if gradient is not None:
                gradient.mul_(factor)

    def weighted(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """A loss times its weight; `average` divides by the sum of the weights. See `DataParallel`."""
        self._weight = weight if self._weight is None else self._weight + weight
        return loss * weight

    def average(self, rows: float | None) -> None:
        """Turn gradients into means over the ranks, or over their rows or weights, as far as any are given.

        ValueError if rows are given and there are none on any rank.
        """
        self.sum_over_ranks()
        weight, self._weight = self._weight if rows is None else rows, None
        if weight is None:
            return
        rows, over = float(weight), self.sets[0].gradient_comm
        device = next((parameter.device for parameter in self._all), None)
        total = float(
            comm.all_reduce(torch.tensor(rows, dtype=torch.float64, device=device), group=over.group)
        )
        if rows < 0 or not total:
            raise ValueError(
                f"rows is {rows:g}, and over all ranks {total:g}; give each rank's number of rows"
            )
        # What compression has kept back belongs to sums over rows, as the next step's gradients will.
        self.rescale(over.ranks / total, kept=False)

    def clear(self) -> None:
        """Drop the gradients in the buckets, and what compression has kept back of them."""
        for own in self.sets:
            own.clear()

    def publish(self) -> None:
        """Bring all shares of the parameters to every rank: an all-gather of each bucket."""
        self.slices.round_masters()
        buckets = self.value_buckets()
        for bucket in buckets:  # launch
            bucket.gather(blocking=bucket is buckets[-1])
        for bucket in buckets:  # wait
            bucket.wait()

    def resident(self) -> list[Tensor]:
        """The parameters, whole."""
        return [*self._all]

    def bytes_per_step(self, passes: int = 1) -> int:
        """Bytes that this rank sends in a step of so many passes, once a first one has made the buckets."""
        if any(reducer.buckets is None for reducer in self.reducers):
            raise RuntimeError("the buckets follow from the first backward pass; train a step first")
        sent = sum(bucket.gather_bytes() for bucket in self.value_buckets())
        for own in self.sets if self.reducers else ():
            sent += own.residency.reductions(passes) * own.bytes_sent()
        return sent


def agree_on_order(
    seen: list[int], count: int, gradient_comm: GradientComm, device: torch.device
) -> list[int]:
    """Rank 0's order of all parameters: as its gradients came; then, last registered first, those without."""
    missing = [index for index in reversed(range(count)) if index not in set(seen)]
    if gradient_comm.ranks == 1:
        return [*seen, *missing]
    order = torch.tensor([*seen, *missing], dtype=torch.int64, device=device)
    comm.broadcast(order, source=0, group=gradient_comm.group)
    agreed: list[int] = order.tolist()
    return agreed


def start_equal(module: nn.Module, sets: Sequence[ParameterSet]) -> None:
    """Give a set's ranks the first one's values, and all rank 0's buffers; see `shared_tensors`."""
    for own, tensors in shared_tensors(module, sets):
        broadcast_together(tensors, own.gradient_comm.group)


def named_in(groups: Iterable[dict[str, Any]]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of an optimizer's groups with their numbers, for a loop without a module."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return [(str(index), parameter) for index, parameter in enumerate(parameters)]


def start_new_equal(named: Sequence[tuple[str, nn.Parameter]], own: ParameterSet) -> None:
    """Give parameters that a loop adds to a set rank 0's values, if they may be shared. A collective."""
    for _, parameter in named:
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"params has one of layout {parameter.layout}, which cannot be dealt out; "
                "give dense parameters (their gradients may be sparse)"
            )
    require_free(named, shared_with=[BY_DATA_PARALLEL, BY_ZERO])
    refuse_meta("params", named)
    if own.gradient_comm.ranks > 1:
        require_same("parameters", named, own.gradient_comm.group)
        broadcast_together([parameter for _, parameter in named], own.gradient_comm.group)
