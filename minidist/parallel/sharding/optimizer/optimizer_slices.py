"""This rank's optimizer slices: the part of all parameters that its optimizer updates, with its state.

Where every rank keeps the whole optimizer state, as in data parallelism, this rank owns everything: the
slices are the parameters themselves, or their masters. Otherwise they are pieces of this rank's shares of
flat buckets, once parameters are dealt to those. Few long tensors cost an optimizer fewer calls than many
short ones, but what it computes on one has to stay in a core's cache from one operation to the next, hence
`SLICE_BYTES`.

A piece of a share ends where another parameter group begins, where the share ends, and between two neighbours
of which only one had a gradient in some step: their states differ from then on. A slice's state is cut with
it, and joined again where it agrees.

Masters are copies of half-precision parameters in float32, say, which the optimizer updates
(master_weights.py).

Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (each rank updates its part).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.training_state import parameter_like
from minidist.parallel.contract.user_functions import requires_closure
from minidist.parallel.flat.bucket_layout import ParameterRange
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.optimizer.memory_source import MemorySource
from minidist.parallel.sharding.optimizer.whole_on_owners import WholeOnOwners
from minidist.parallel.training.elementwise_optimizers import is_elementwise

SLICE_BYTES = 2**20
"""Most bytes of a slice, where parameters may be cut. On one core torch's AdamW took, in tensors of 1 MB or
of 0.5 MB, 0.47 of the time that 1.7 million elements in one tensor took; of 2 MB 0.92, of 0.13 MB 0.60."""
SCALARS = {"step", "mu_product", "eta", "mu"}
"""The keys of torch's optimizer state that hold one number for a parameter; all others have its shape."""
OptimizerState = dict[str, Any]


@dataclass(eq=False)
class OptimizerSlice:
    """What the optimizer updates as one tensor: a whole parameter, or neighbouring elements of a share."""

    bucket: Bucket[Any] | WholeOnOwners | None  # whose share the elements are of; None for a whole parameter
    group: int | None  # the number of the optimizer's group; None for what the optimizer leaves out
    start: int  # in the bucket's share
    ranges: list[ParameterRange]  # one after the other
    value: Tensor  # the parameter, or the elements in the bucket
    tensor: nn.Parameter  # the optimizer updates this: `value`, a view of it, or a copy in the master dtype
    is_master: bool  # whether it is a copy
    cuts: bool  # whether it may begin and end inside a parameter, and its state with it

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def has_cut(self, key: str, value: Any) -> bool:
        """Whether the state under `key` is cut along with the parameter."""
        return self.cuts and has_elements(key, value)


AT_ONCE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
MANY, SMALL = 64, 2**12
"""How many tensors of a group are updated in one call, and how many elements they have at most on average."""
RangeOfSlice = tuple[OptimizerSlice, ParameterRange, Tensor, OptimizerState]
"""A slice, one of its ranges, and that range's views of the updated tensor and of the state."""


class OptimizerSlices:
    """The slices that replace the parameters in `optimizer`'s groups; its state belongs to them.

    master: the dtype of the copies that it updates; None for the values themselves. memory: where copies and
    state lie.

    Attributes:
        has_shares: whether any slice is a part of a share.
        updating: the optimizer's step is under way.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master: torch.dtype | None,
        memory: MemorySource | None = None,
    ) -> None:
        self.optimizer, self.master, self.memory = optimizer, master, memory or MemorySource()
        self.all: list[OptimizerSlice] = []
        self.updating = self.has_shares = False

    @classmethod
    def none(cls) -> OptimizerSlices:
        """No slices, for a loop with an optimizer of its own."""
        nothing: Any = [{"params": []}]
        return cls(torch.optim.SGD(nothing), None)

    def add_whole(self, index: int, group: int | None, value: nn.Parameter, tensor: nn.Parameter) -> None:
        """Make a slice of a whole parameter, for which the optimizer updates `tensor`."""
        span = [ParameterRange(index, 0, value.numel())]
        self.all.append(OptimizerSlice(None, group, 0, span, value, tensor, tensor is not value, False))

    def add(self, buckets: Sequence[Bucket[Any] | WholeOnOwners], group_of: Mapping[int, int]) -> None:
        """Make slices of this rank's shares of buckets; `group_of` has a group for each parameter index."""
        self.has_shares |= bool(buckets)
        pieces = [(bucket, *piece) for bucket in buckets for piece in bucket.layout.ranges()]
        for bucket, start, whole in pieces:
            group = group_of.get(whole.param_index)
            if not self.may_cut(group):
                if not bucket.layout.cuts_anywhere:  # else the whole parameter lies elsewhere, on its owner
                    value = bucket.values.shard[start : start + len(whole)]
                    self.all.append(self._slice(bucket, group, start, [whole], value, None))
                continue
            limit = self._limit(bucket)
            for at in range(0, len(whole), limit):
                first = whole.start + at
                span = ParameterRange(whole.param_index, first, min(first + limit, whole.stop))
                value = bucket.values.shard[start + at : start + at + len(span)]
                self.all.append(self._slice(bucket, group, start + at, [span], value, None))
        self.hand_over()
        self.join()

    def may_cut(self, group: int | None) -> bool:
        """Whether a slice of the optimizer's group may begin and end inside a parameter."""
        return group is None or is_elementwise(type(self.optimizer), self.optimizer.param_groups[group])

    # A step: gradients, the optimizer's own step, values.

    def give_gradients(self, used: Mapping[int, float]) -> None:
        """Give slices their reduced gradients; None to those of parameters that no rank used.

        used: for each parameter index how many ranks used it; whole parameters that none used have no
        gradient.
        """
        self.give_whole_gradients()
        if not self.has_shares:
            return
        of_shares = [each for each in self.all if each.bucket is not None]
        counts = [sum(used[span.param_index] > 0 for span in each.ranges) for each in of_shares]
        if any(0 < count < len(each.ranges) for count, each in zip(counts, of_shares, strict=True)):
            self.regroup(lambda each, span, _: (id(each), used[span.param_index] > 0))
        for each in self.all:
            if each.bucket is not None:
                gradients, grad = each.bucket.gradients, None
                if gradients is not None and used[each.ranges[0].param_index] > 0:  # as all of the slice's
                    own = gradients.reduced[each.start : each.start + each.value.numel()]
                    grad = own.view(each.tensor.shape)
                each.tensor.grad = grad if grad is None else grad.to(each.tensor.dtype)

    def give_whole_gradients(self) -> None:
        """Give the masters of whole parameters the parameters' gradients, in the master dtype."""
        for each in self.all if self.master is not None else ():
            if each.bucket is None and each.is_master:
                grad = each.value.grad
                each.tensor.grad = grad if grad is None else grad.to(each.tensor.dtype)

    def gradients(self) -> list[Tensor]:
        """The gradients that were given."""
        return [each.tensor.grad for each in self.all if each.tensor.grad is not None]

    def masters(self) -> list[Tensor]:
        """The copies in the master dtype."""
        return [each.tensor for each in self.all if each.is_master]

    def update(
        self,
        complete: Callable[[], object],
        publish: Callable[[], object],
        closure: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Any:
        """The optimizer's step on this rank's slices; returns the loss that `closure` computes.

        complete: completes the gradients. publish: lets all ranks compute with what the optimizer has made of
        the slices. closure: computes the loss and its gradients anew. An optimizer that requires one calls it
        itself; each call but the first publishes before. options: further arguments of the optimizer's own
        `step`.
        """
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            if calls:  # the optimizer has changed the slices since
                publish()
            calls += 1
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            complete()
            return loss

        self.updating = True
        try:
            if closure is not None and requires_closure(self.optimizer):
                loss = self.step(closure=evaluate, **options)
            else:
                loss = evaluate()
                self.step(**options)
        finally:
            self.updating = False
        publish()
        return loss

    def step(self, **options: Any) -> Any:
        """Update the slices; `round_masters` comes next. `options` are for the optimizer's own step."""
        if self.memory.longest is None or "closure" in options:  # which needs the gradients of all slices
            with self._many_at_once():
                return self.optimizer.step(**options)
        return self._step_one_by_one(**options)

    @contextmanager
    def _many_at_once(self) -> Iterator[None]:
        """Let an optimizer of torch's update many small tensors in one call, as it does on a GPU.

        The bits are the same, and AdamW takes a third less time for 1,000 layers of 16 x 16. Tensors are
        small, so that the temporary ones are too.
        """
        many = [
            group
            for group in self.optimizer.param_groups
            if type(self.optimizer) in AT_ONCE
            and group.get("foreach", False) is None
            and not any(group.get(option) for option in ("fused", "differentiable"))
            and len(group["params"]) >= MANY
            and sum(each.numel() for each in group["params"]) <= SMALL * len(group["params"])
        ]
        for group in many:
            group["foreach"] = True
        try:
            yield
        finally:
            for group in many:
                group["foreach"] = None

    def _step_one_by_one(self, **options: Any) -> None:
        """Update slice by slice, so that only one has to be in memory; state that is made moves to disk."""
        groups = self.optimizer.param_groups
        try:
            for group in groups:
                group["params"] = []
            for each in self.all:
                if each.tensor.grad is not None and each.group is not None:
                    groups[each.group]["params"] = [each.tensor]
                    self.optimizer.step(**options)
                    groups[each.group]["params"] = []
                    state = self.optimizer.state[each.tensor]
                    state.update({k: self.memory.keep(v) for k, v in state.items() if has_elements(k, v)})
        finally:
            self.hand_over()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Write each master, rounded, into the tensor that the model computes with."""
        for each in self.all:
            if each.is_master:
                each.value.copy_(each.tensor)

    @torch.no_grad()
    def overwrite(self, bucket: Bucket[Any] | WholeOnOwners, shard: Tensor) -> None:
        """Take new values for this rank's share of a bucket; masters change only where the values do."""
        for each in self.all:
            if each.bucket is bucket and each.is_master:
                new = shard[each.start : each.start + len(each)].view(each.value.shape)
                each.tensor.copy_(torch.where(new == each.value, each.tensor, new.to(each.tensor.dtype)))
        bucket.values.shard.copy_(shard)

    def drop_gradients(self) -> None:
        """Forget the gradients that were given; those of whole parameters are their own."""
        for each in self.all if self.has_shares or self.master is not None else ():
            if each.tensor is not each.value:
                each.tensor.grad = None

    def reload(self) -> bool:
        """After state was loaded: round masters and join what agrees; returns whether there are masters."""
        for state in self.optimizer.state.values():
            tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
            state.update({k: v.clone() for k, v in tensors.items() if k in SCALARS or not v.dim()})
        self.join()
        self.round_masters()
        return self.master is not None

    # Cut and join, with the state.

    def _slice(
        self,
        bucket: Bucket[Any] | WholeOnOwners,
        group: int | None,
        start: int,
        ranges: list[ParameterRange],
        value: Tensor,
        master: Tensor | None,
    ) -> OptimizerSlice:
        """A slice of the elements in `value`; `master` has them in the master dtype, if they are known."""
        cuts, index = self.may_cut(group), bucket.layout.param_indices.index(ranges[0].param_index)
        if not cuts:
            value = value.view(bucket.layout.shapes[index])
        # Whole parameters that the optimizer leaves out have none: what a loop writes to one has to stay.
        if self.master not in (None, value.dtype) and (group is not None or bucket.values.frees):
            master = self.memory.copy(value, self.master) if master is None else self.memory.keep(master)
        updated = value if master is None else master
        whole: Any = bucket.parameters[index]
        tensor = nn.Parameter(updated) if cuts else parameter_like(whole, updated)
        return OptimizerSlice(bucket, group, start, ranges, value, tensor, master is not None, cuts)

    def _limit(self, bucket: Bucket[Any] | WholeOnOwners) -> int:
        """The most elements that a slice may have."""
        return max(1, (self.memory.longest or SLICE_BYTES) // (self.master or bucket.layout.dtype).itemsize)

    def hand_over(self) -> None:
        """Have the optimizer's groups consist of the slices."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [each.tensor for each in self.all if each.group == number]

    def by_parameter(self) -> Iterator[RangeOfSlice]:
        """Every range of a parameter, with views of the updated tensor and of the state."""
        for each in self.all:
            at = 0
            for span in each.ranges:
                stop = at + len(span)
                state = {
                    key: value[at:stop] if each.has_cut(key, value) else value
                    for key, value in self.optimizer.state.get(each.tensor, {}).items()
                }
                tensor = each.tensor.detach()
                yield each, span, tensor if each.bucket is None else tensor.view(-1)[at:stop], state
                at = stop

    def regroup(self, key: Callable[[OptimizerSlice, ParameterRange, OptimizerState], Hashable]) -> None:
        """Cut and join slices so that neighbours with the same `key`, and no others, are one.

        Whole parameters stay as they are. Where slices are joined, the scalars of their states are equal.
        """
        now = [each for each in self.all if not each.cuts]
        if len(now) == len(self.all):
            return
        for _, together in groupby(
            [part for part in self.by_parameter() if part[0].cuts],
            lambda part: (id(part[0].bucket), part[0].group, key(part[0], part[1], part[3])),
        ):
            for run in self._runs([*together]):
                unchanged = [span for _, span, _, _ in run] == run[0][0].ranges
                now.append(run[0][0] if unchanged else self._joined(run))
        kept = {id(each) for each in now}
        for each in self.all:
            if id(each) not in kept:
                self.optimizer.state.pop(each.tensor, None)
        self.all = now
        self.hand_over()

    def _runs(self, parts: Sequence[RangeOfSlice]) -> Iterator[list[RangeOfSlice]]:
        """Cut neighbours into runs that are not longer than a slice may be, unless one range alone is."""
        bucket = parts[0][0].bucket
        assert bucket is not None  # whole parameters stay as they are
        limit, filled = self._limit(bucket), 0
        run: list[RangeOfSlice] = []
        for part in parts:
            if run and filled + len(part[1]) > limit:
                yield run
                run, filled = [], 0
            run.append(part)
            filled += len(part[1])
        yield run

    def _joined(self, run: Sequence[RangeOfSlice]) -> OptimizerSlice:
        """The slice that the neighbours in `run` become, with their state."""
        first, ranges = run[0][0], [span for _, span, _, _ in run]
        assert first.bucket is not None
        start = first.start + sum(map(len, first.ranges[: first.ranges.index(ranges[0])]))
        value = first.bucket.values.shard[start : start + sum(map(len, ranges))]
        master = torch.cat([part for _, _, part, _ in run]) if first.is_master else None
        made = self._slice(first.bucket, first.group, start, ranges, value, master)
        state = {
            key: self.memory.keep(torch.cat([each[key] for *_, each in run]))
            if has_elements(key, one)
            else deepcopy(one)
            for key, one in run[0][3].items()
        }
        if state:
            self.optimizer.state[made.tensor] = state
        return made

    def apart(self) -> None:
        """Make a slice of every range, so that each parameter has its own scalars."""
        self.regroup(lambda _, span, state: span.param_index)

    def join(self) -> None:
        """Make neighbours whose scalars agree one slice."""
        self.regroup(
            lambda _, span, state: tuple(
                (k, None if has_elements(k, v) else float(v)) for k, v in sorted(state.items())
            )
        )

    def load_whole_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take this rank's part of the states of whole parameters, given by parameter index."""
        self.apart()
        for each in self.all:
            (span,) = each.ranges
            state = dict(states.get(span.param_index, {}))
            if each.bucket is not None:
                state = {key: self._own_part(key, value, each, span) for key, value in state.items()}
            if state:
                self.optimizer.state[each.tensor] = state
        self.join()

    def _own_part(self, key: str, value: Any, into: OptimizerSlice, span: ParameterRange) -> Any:
        if not isinstance(value, Tensor):
            return value
        if key == "step":  # keeps its device and precision
            return value.detach().clone()
        if into.cuts and key not in SCALARS:
            value = value.reshape(-1)[span.start : span.stop]
        dtype = into.tensor.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=into.tensor.device, dtype=dtype, copy=True)


def has_elements(key: str, value: Any) -> bool:
    """Whether the state under `key` has a number for each element of a parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and key not in SCALARS
