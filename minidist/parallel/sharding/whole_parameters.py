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

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import bytes_of
from minidist.parallel.compression.compressor import Compression
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.flat.joined_messages import MB, broadcast_together, deal_to_buckets, require_same
from minidist.parallel.guards.ownership import DATA_PARALLEL, ZERO, claim, owners
from minidist.parallel.sharding.gradient_rounds import GradientRounds
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.parameter_set import ParameterSet
from minidist.parallel.sharding.reducer import Reducer
from minidist.parallel.sharding.residency import Residency
from minidist.parallel.sharding.units import weakly
from minidist.parallel.training.clipping import guard

Named = Iterable[tuple[str, nn.Parameter]]


class WholeParameters(ParameterSet):
    """Parameters that every rank has whole; hooks on them reduce their gradients. Making it is a collective.

    named: gives the parameters with their names, the same on all ranks; called again when they may have
    changed. slices, groups: this rank's part of the optimizer, and its groups of whole parameters; none for a
    loop of data parallelism, which has an optimizer of its own. module: is watched for parameters that are
    added to its parts. average: gradients become means over the ranks, and not sums. leaves_grad: see
    `GradientRounds`. broadcast_buffers: send rank 0's buffers of the module to all before each pass that
    sends gradients.
    """

    def __init__(
        self,
        named: Callable[[], Named],
        residency: Residency,
        gradient_comm: GradientComm,
        slices: OptimizerSlices | None = None,
        groups: Sequence[dict[str, Any]] = (),
        module: nn.Module | None = None,
        bucket_mb: float = 25,
        overlap: bool = True,
        compression: Compression | None = None,
        average: bool = True,
        leaves_grad: bool = False,
        broadcast_buffers: bool = False,
    ) -> None:
        self._named, self.residency, self.gradient_comm = named, residency, gradient_comm
        self.groups, self.bucket_mb, self.overlap = groups, bucket_mb, overlap
        self.compression, self.average, self.leaves_grad = compression, average, leaves_grad
        if slices is not None:
            self.slices = slices
        self._has_masters = slices is not None and slices.master is not None
        self._module, self._broadcast_buffers = module, broadcast_buffers
        self.parameters: list[nn.Parameter] = []  # get gradients, or did; parameter indices number this list
        self.orders, self.buckets, self.masters = [], [], {}
        self.replaced = False  # another set has been made of the same parameters
        self.reducer: Reducer | None = None  # None where there is nobody to share with
        self._before: GradientRounds | None = None  # the next rounds continue it
        self._own: tuple[float | Tensor, float | Tensor] = (0.0, 0.0)  # this rank's totals
        self._is_reduced = self._is_given = False  # gradients are sums now; the slices have their part
        self._attach()

    # Hooks, on the parameters that get gradients.

    def _attach(self) -> None:
        """Put hooks on the parameters that get gradients now; a backward pass shows how to deal them."""
        named = [*self._named()]
        self._names: dict[Tensor, str] = {p: name for name, p in reversed(named)}
        self._all = [p for _, p in named]
        trained = [p for p in self._all if p.requires_grad]
        self._parts = [] if self._module is None else [*self._module.modules()]
        self._known, self._trained = set(map(id, self._all)), self._trained_now()
        if self.residency.state:
            self.parameters, self.orders, self.buckets = trained, [], []
            claim(self, DATA_PARALLEL, trained)
        else:
            self._list(trained)
            self._hooked = set(map(id, trained))
            guard(self._all, weakly(self._why_not_clipped))
            self._replace_others(self._all)
        syncing = self.reducer is None or self.reducer.syncing
        self.reducer = None
        if self.residency.state and self.gradient_comm.ranks == 1:
            self.orders = None
            return
        listed = [(self.name_of(index), p) for index, p in enumerate(self.parameters)]
        self.reducer = Reducer(listed, self.gradient_comm, self.overlap, weakly(self._first_round))
        self.reducer.syncing = syncing and not self.leaves_grad
        if not (self.average and self.residency.state):  # a reduction to owners takes the mean itself
            self.reducer.scale = 1.0

    def _list(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Number parameters that have no index yet; returns whether there are any."""
        listed = set(map(id, self.parameters))
        new = [parameter for parameter in parameters if id(parameter) not in listed]
        self.parameters += new
        return bool(new)

    def _replace_others(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take parameters from a set with shared state that this one replaces."""
        for other in owners(parameters, ZERO):
            if other is not self:
                other.reducer.detach()
                other.replaced = True
        claim(self, ZERO, parameters)

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
        if self.residency.state:
            if self._trained_now() != self._trained:
                self._require_known()
                self.reattach()
            return
        for bucket in self.buckets:
            bucket.refuse_reassigned()
        if any(p.requires_grad and id(p) not in self._hooked for p in self._all):
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
        if self.reducer is not None:
            if not self.residency.state:  # whose buckets are made anew
                self._before = self.reducer.rounds or self._before
            self.reducer.detach()
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
    def waiting(self) -> list[int]:  # type: ignore[override]
        """The indices of parameters that are in no bucket yet, where buckets have the state."""
        return [] if self.residency.state else self._undealt()

    def _undealt(self) -> list[int]:
        dealt = {index for order in self.orders or () for index in order}
        return [index for index in range(len(self.parameters)) if index not in dealt]

    def _first_round(self, seen: Iterable[int]) -> GradientRounds:
        """Deal the parameters that are in no bucket, and begin rounds of all. A collective."""
        over, count = self.gradient_comm, len(self.parameters)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        if over.ranks > 1:
            require_same(
                "parameters", [(self.name_of(i), self.parameters[i]) for i in range(count)], over.group
            )
        order, sparse = agree_on_order([*seen], count, over, device), list[int]()
        if self.residency.state:  # then every rank gets the rows of sparse gradients
            grads = [p.grad for p in self.parameters]
            own = torch.tensor([int(g is not None and g.is_sparse) for g in grads], device=device)
            anywhere = comm.all_reduce(own, "max", group=over.group).tolist()
            sparse = [index for index, is_sparse in enumerate(anywhere) if is_sparse]
        self._deal(order, sparse)
        before, self._before = self._before, None  # its buckets' memory goes with it
        return GradientRounds(
            self.parameters,
            self.buckets,
            over,
            self.residency,
            "mean" if self.average else "sum",
            self.leaves_grad,
            self.compression,
            sparse,
            total_count=2 if self.residency.state else 3,  # see `begin_final_backward`
            before=before,
        )

    def _deal(self, seen: Iterable[int], sparse: Sequence[int] = ()) -> None:
        """Make buckets, with loaded state, for the parameters in `seen` that are in none. A collective."""
        undealt, limit = {*self._undealt()}, int(self.bucket_mb * MB)
        order = [index for index in seen if index in undealt]
        if order and self.orders is not None:
            self.orders.append(order)
        if self.residency.state:
            parts = deal_to_buckets(self.parameters, [index for index in order if index not in sparse], limit)
            self.buckets += [Bucket(part, self.parameters) for part in parts]
            return
        cut_anywhere = self.slices.cut_anywhere
        if not cut_anywhere and order:  # a large parameter's bucket would be mostly padding
            limit = max(limit, self.gradient_comm.owners * max(bytes_of(self.parameters[i]) for i in order))
        new = [
            Bucket(part, self.parameters, self.gradient_comm, cut_anywhere, name_of=weakly(self.name_of))
            for part in deal_to_buckets(self.parameters, order, limit)
            if part
        ]
        number_of = {id(p): number for number, group in enumerate(self.groups) for p in group["params"]}
        numbers = {index: number_of.get(id(parameter)) for index, parameter in enumerate(self.parameters)}
        group_of = {index: number for index, number in numbers.items() if number is not None}
        whole = self.slices.optimizer.state
        states = {i: whole.pop(self.parameters[i]) for i in order if self.parameters[i] in whole}
        for bucket in new:
            bucket.keep_values()
            self.slices.add(bucket, group_of)
        for _, span, tensor, _ in self.slices.by_parameter():
            master = self.masters.get(self.parameters[span.param_index])
            if master is not None:
                tensor.copy_(master.reshape(-1)[span.start : span.stop])
        for index in order:
            self.masters.pop(self.parameters[index], None)
        self.buckets += new
        if states:
            self.slices.load_whole_states(states)

    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Make the buckets in the saved order: in another one, sums would add up in another order.

        A run that saved no order is taken to have that of registration, reversed.
        """
        if self.residency.state:
            return
        self.follow_changes()
        had = {*saved, *(name for each in order or () for name in each)}
        frozen = [p for name, p in self._named() if name in had]
        if self._list(frozen):  # the optimizer has state of them, although they get no gradients now
            self.reattach()
        if self.buckets:
            return
        index_of = {self.name_of(index): index for index in range(len(self.parameters))}
        for each in [[*reversed(index_of)]] if order is None else order:
            self._deal(index_of[name] for name in each if name in index_of)
        if self.buckets and not self.waiting and self.reducer is not None:
            self.reducer.settled()

    # A step: passes, gradients, and the parameters to all ranks.

    def ready(self) -> None:
        """Prepare a forward pass: complete a round that an error has interrupted, and follow changes."""
        if self.reducer is not None and torch.is_grad_enabled():
            self.reducer.recover()
            self.follow_changes()
            module = self._module
            if module is not None and self._broadcast_buffers and module.training and self.reducer.syncing:
                broadcast_together([*module.buffers()], self.gradient_comm.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's rows."""
        assert self._module is not None
        self.ready()
        return self._module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank and nothing is sent, if the residency keeps them whole."""
        before = self.reducer is None or self.reducer.syncing
        try:
            if self.reducer is not None and self.residency.gradients:
                self.reducer.syncing = False
            yield
        finally:
            if self.reducer is not None:  # perhaps another: `requires_grad` may have changed
                self.reducer.syncing = before

    def begin_final_backward(self, totals: tuple[float | Tensor, float | Tensor], waits: bool) -> None:
        """Have the next backward pass complete the round, which also sums `totals` over the ranks.

        Where the state is shared, a third total counts the ranks for which this is the step's last pass.
        """
        self._own = totals
        if self.reducer is not None:
            last: tuple[float, ...] = () if self.residency.state else (1.0,)
            self.reducer.totals, self.reducer.waits = (*totals, *last), waits

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients; returns the totals, summed over the ranks.

        Where every backward pass is a round, ranks may have had different numbers of them: each takes part in
        the others' until it was the last one for all.
        """
        self._is_reduced, self._is_given = True, False
        if self.reducer is None:
            weight, loss = map(float, self._own)
            return weight, loss
        rounds = self.current().synchronize()
        while not self.residency.state and float(rounds.sums[2]) < self.gradient_comm.ranks:
            self.reducer.totals = (0.0, 0.0, 1.0)
            self.reducer.synchronize()
        weight, loss = (rounds.sums if self.residency.state else rounds.totals).tolist()
        return weight, loss

    def current(self) -> Reducer:
        """The reducer of the parameters that get gradients now."""
        if self.replaced:
            raise RuntimeError(
                "this ZeroOptimizer's parameters have been given to another since; step with that one"
            )
        if not self.residency.state:
            self.follow_changes()
        assert self.reducer is not None
        return self.reducer

    def complete(self, steps: bool = False) -> None:
        """Complete the gradients and give the slices their part, unless that is done. A collective."""
        if not self._is_reduced:
            self.reduce()
        elif self.reducer is not None and self.reducer.pending:
            raise RuntimeError("gradients came after clip_grad_norm; call it after the last backward()")
        self.gradients()
        self._is_reduced = not steps

    def reduce(self) -> None:
        """Make sure that a round has summed the gradients that came. A collective."""
        if self.reducer is not None:
            self.current().synchronize()
        self._is_reduced, self._is_given = True, False

    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums, which the slices get now if they have not."""
        if self._is_reduced and not self._is_given:
            self.slices.give_gradients(self.rounds.used.tolist() if self.rounds is not None else ())
            self._is_given = True
        return self.slices.gradients()

    def update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's slices and publish them; forget the sums that this has used."""
        loss = self.slices.update(partial(self.complete, steps=True), self.publish, closure, **options)
        self.slices.drop_gradients()
        if self.rounds is not None:
            self.rounds.begin()
        if not (self.residency.state or self.leaves_grad):
            for parameter in self.parameters:  # sums in one part, and this rank's own gradients in the others
                parameter.grad = None
        return loss

    def forget(self) -> None:
        """Forget the gradients of a step, and their sums."""
        self.forget_sums()
        for parameter in self._all:
            parameter.grad = None

    def forget_sums(self) -> None:
        """Forget the sums of a step's gradients."""
        self._is_reduced = False
        self.slices.drop_gradients()
        if not self.residency.state and self.reducer is not None:
            self.reducer.recover()
            if self.reducer.rounds is not None:
                self.reducer.rounds.begin()

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the complete gradients; with `kept` also what compression has kept back of them."""
        if not self.residency.state or (self._has_masters and not kept):
            super().rescale(factor)
            return
        if self.rounds is not None:
            self.rounds.rescale(factor, kept)
        else:
            for parameter in self._all:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self._is_given = False  # masters take theirs anew

    def clear(self) -> None:
        """Drop the gradients in the buckets, and what compression has kept back of them."""
        if self.rounds is not None:
            self.rounds.clear()

    def publish(self) -> None:
        """Bring everyone's share of the parameters to all: an all-gather of each bucket."""
        self.slices.round_masters()
        if self.residency.state:
            return
        for bucket in self.buckets:  # launch
            bucket.gather(blocking=bucket is self.buckets[-1])
        for bucket in self.buckets:  # wait
            bucket.wait()

    @property
    def rounds(self) -> GradientRounds | None:  # type: ignore[override]
        """The rounds, once the first backward pass has dealt the parameters to buckets."""
        return None if self.reducer is None else self.reducer.rounds

    def resident(self) -> list[Tensor]:
        """The parameters, whole."""
        return [*self._all]

    def bytes_per_step(self, passes: int = 1) -> int:
        """Bytes that this rank sends in a step of so many passes, once a first one has made the buckets."""
        if self.reducer is None:
            return 0
        if self.reducer.rounds is None:
            raise RuntimeError("the buckets follow from the first backward pass; train a step first")
        published = 0 if self.residency.state else sum(bucket.gather_bytes() for bucket in self.buckets)
        return self.residency.reductions(passes) * self.reducer.rounds.bytes_sent() + published


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


def start_equal(module: nn.Module, gradient_comm: GradientComm) -> None:
    """Give all ranks rank 0's parameters and buffers. A collective; ValueError where the modules differ."""
    if gradient_comm.ranks > 1:
        state = [*module.named_parameters(), *module.named_buffers()]
        require_same("parameters and buffers", state, gradient_comm.group)
        broadcast_together([tensor for _, tensor in state], gradient_comm.group)
