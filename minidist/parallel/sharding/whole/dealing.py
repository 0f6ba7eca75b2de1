"""Deal whole parameters to flat buckets, in the order in which a backward pass brings their gradients.

Registration order is only a guess at this order, and ranks may see different ones: if their buckets differed,
they would add up gradients of different parameters. So rank 0's order holds for all.

Where the optimizer's state is shared, a bucket also holds the parameters' values, cut into one share for each
rank, and this rank's share goes to its slices (optimizer_slices.py); until then each parameter is a slice of
its own. Parameters that get gradients only later, because they were frozen or not there, are dealt to further
buckets; the buckets before stay, with their state. Where the state is whole, buckets hold nothing between
steps, so all parameters are dealt anew.

Sources: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), section 3.2.3; Rajbhandari et al. 2020,
"ZeRO" (see zero.py), sections 5.1 (the optimizer's state in equal parts) and 5.2 (gradients in buckets, one
part each).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradients import GradientComm, Gradients
from minidist.parallel.flat.joined_messages import require_same
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.training.elementwise_optimizers import work_of
from minidist.parallel.training.master_weights import master_of


class Dealer:
    """Deals the parameters of `sets` to their buckets, which hold up to `limit` bytes.

    slices, groups: see `WholeParameters`. name_of: a parameter's name. masters: whether parameters have whole
    masters until they are dealt.

    Attributes:
        parameters: that get gradients, or did; parameter indices number this list.
        orders: parameter indices, for each time that some were dealt.
    """

    def __init__(
        self,
        sets: Sequence[ParameterSet],
        slices: OptimizerSlices,
        groups: Sequence[dict[str, Any]],
        limit: int,
        name_of: Callable[[int], str],
        masters: bool,
    ) -> None:
        self.sets, self.slices, self.groups, self.limit, self.name_of = sets, slices, groups, limit, name_of
        self._whole_master = slices.master if masters else None
        self.parameters: list[nn.Parameter] = []
        self.orders: list[list[int]] = []

    def number(self, parameters: Iterable[nn.Parameter], set_of: Mapping[Tensor, ParameterSet]) -> bool:
        """Give parameters that have no index yet one, also in their sets; returns whether there are any."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        count, known = len(numbers), {index for each in self.sets for index in each.indices}
        group_of, state = self._group_numbers(), self.slices.optimizer.state
        for parameter in parameters:
            if id(parameter) not in numbers:
                index = numbers[id(parameter)] = len(numbers)
                self.parameters.append(parameter)
                if not self.sets[0].residency.whole_state:
                    group = group_of.get(id(parameter))
                    tensor = parameter if group is None else master_of(parameter, self._whole_master)
                    if tensor is not parameter and parameter in state:  # which the optimizer began with
                        state[tensor] = state.pop(parameter)
                    self.slices.add_whole(index, group, parameter, tensor)
            if numbers[id(parameter)] not in known:
                set_of[parameter].indices.append(numbers[id(parameter)])
        return len(numbers) > count

    def empty(self) -> None:
        """Have no parameters, and no buckets of them."""
        self.parameters.clear()
        self.orders.clear()
        for param_set in self.sets:
            param_set.empty()

    def _group_numbers(self) -> dict[int, int]:
        """The number of each parameter's group, by the parameter's id."""
        return {id(p): number for number, group in enumerate(self.groups) for p in group["params"]}

    def first_round(self, seen: Iterable[int]) -> list[tuple[ParameterSet, Gradients]]:
        """Deal the parameters that are in no bucket, and make room for a round. A collective.

        seen: their indices as this rank's gradients came. Returns the gradients of all
        buckets with their sets, as they are sent.
        """
        over, count = self.sets[0].gradient_comm, len(self.parameters)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        for each in self.sets:
            if each.gradient_comm.ranks > 1:
                named = [(self.name_of(index), self.parameters[index]) for index in each.indices]
                require_same("parameters", named, each.gradient_comm.group)
        numbers = {index: number for number, each in enumerate(self.sets) for index in each.indices}
        if len(self.sets) > 1:  # names may differ between ranks, but each rank needs the same sets in order
            numbered = [(str(numbers[index]), self.parameters[index]) for index in sorted(numbers)]
            require_same("sets of parameters", numbered, over.group)
        order, sparse = agree_on_order([*seen], count, over, device), list[int]()
        if self.sets[0].residency.whole_state:  # then every rank gets the rows of sparse gradients
            grads = [p.grad for p in self.parameters]
            is_sparse = torch.tensor([int(g is not None and g.is_sparse) for g in grads], device=device)
            anywhere = comm.all_reduce(is_sparse, "max", group=over.group).tolist()
            sparse = [index for index, found in enumerate(anywhere) if found]
        self.deal(order, sparse)
        for each in self.sets:
            each.make_room(self.parameters, sparse)
        when = {index: at for at, index in enumerate(i for order in self.orders for i in order)}
        pairs = [(each, gradients) for each in self.sets for gradients in each.gradients]
        return sorted(pairs, key=lambda pair: max(when[index] for index in pair[1].layout.param_indices))

    def deal(self, seen: Iterable[int], sparse: Collection[int] = ()) -> None:
        """Make buckets, with loaded state, for parameters that are in none. A collective."""
        undealt = {*self.undealt()}
        order = [index for index in seen if index in undealt]
        number_of = self._group_numbers()
        group_of = {i: number_of[id(p)] for i, p in enumerate(self.parameters) if id(p) in number_of}
        if order:
            self.orders.append(order)
        for param_set in self.sets:
            indices = set(param_set.indices)
            part = [index for index in order if index in indices]
            if param_set.residency.whole_state:
                part = [index for index in part if index not in sparse]
            new = list[Bucket[Any]]()
            for is_cut in (True, False):
                work = None if is_cut else work_of(type(self.slices.optimizer))
                chosen = [i for i in part if self.slices.may_cut(group_of.get(i)) == is_cut]
                new += param_set.deal(self.parameters, chosen, self.limit, work, self.name_of)
            if not param_set.residency.whole_state:
                self._move_state(new, part, group_of)

    def deal_saved(self, order: Sequence[Sequence[str]] | None) -> None:
        """Deal parameters in the saved order of their names: in another one, sums would add up in another.

        If a run saved no order, take that of registration, reversed.
        """
        index_of = {self.name_of(index): index for index in range(len(self.parameters))}
        for each in [[*reversed(index_of)]] if order is None else order:
            self.deal([index_of[name] for name in each if name in index_of])

    def undealt(self) -> list[int]:
        """The indices of parameters that are in no bucket yet."""
        layouts = [bucket.layout for each in self.sets for bucket in each.buckets]
        dealt = {index for layout in layouts for index in layout.param_indices}
        return sorted({index for each in self.sets for index in each.indices} - dealt)

    def _move_state(
        self, new: Sequence[Bucket[Any]], order: Sequence[int], group_of: Mapping[int, int]
    ) -> None:
        """Make slices of new buckets, with the masters and the state that whole parameters had."""
        slices, state = self.slices, self.slices.optimizer.state
        whole = {each.ranges[0].param_index: each for each in slices.all if each.bucket is None}
        states = {i: state.pop(whole[i].tensor) for i in order if whole[i].tensor in state}
        dealt = {id(whole[i]) for i in order}
        slices.all = [each for each in slices.all if id(each) not in dealt]
        slices.add(new, group_of)
        for each, span, tensor, _ in slices.by_parameter():
            if each.bucket in new and whole[span.param_index].is_master:
                master = whole[span.param_index].tensor.detach()
                tensor.copy_(master.reshape(-1)[span.start : span.stop])
        if states:
            slices.load_whole_states(states)


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
