"""The tensors that a rank's optimizer updates: slices of its share, few and long.

Few long tensors cost an optimizer fewer calls than many short ones. But what it computes on one has to stay
in a core's cache from one operation to the next, hence `SLICE_BYTES`. A slice also ends where another
parameter group begins, where the share ends, and between two neighbours of which only one had a gradient in
some step: their states differ from then on. A slice's state is cut with it, and joined again where it agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.sharding.elementwise_optimizers import is_elementwise
from minidist.parallel.sharding.zero_buckets import ParameterRange, ShardBucket

SLICE_BYTES = 2**20
"""Most bytes of a slice, where parameters may be cut. On one core torch's AdamW took, in tensors of 1 MB or
of 0.5 MB, 0.47 of the time that 1.7 million elements in one tensor took; of 2 MB 0.92, of 0.13 MB 0.60."""
SCALARS = {"step", "mu_product", "eta", "mu"}
"""The keys of torch's optimizer state that hold one number for a parameter; all others have its shape."""
OptimizerState = dict[str, Any]


@dataclass(eq=False)
class OptimizerSlice:
    """Neighbouring elements of the share that the optimizer takes for one tensor."""

    bucket: ShardBucket
    group: int  # the number of the optimizer's group
    start: int  # in the bucket's share
    ranges: list[ParameterRange]  # one after the other
    value: Tensor  # the elements, in the bucket
    tensor: Tensor  # the optimizer updates this: `value` itself, or a copy in the master dtype

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def gradient(self) -> Tensor:
        """Its part of the reduced gradients, in the dtype in which it is updated."""
        assert self.bucket.reduced is not None
        grad = self.bucket.reduced[self.start : self.start + len(self)]
        return grad.view(self.value.shape).to(self.tensor.dtype)

    def count(self, used: Sequence[float]) -> int:
        """How many of its parameters some rank used."""
        return sum(used[span.param_index] > 0 for span in self.ranges)


RangeOfSlice = tuple[OptimizerSlice, ParameterRange, Tensor, OptimizerState]
"""A slice, one of its ranges, and that range's views of the updated tensor and of the state."""


class OptimizerSlices:
    """This rank's slices, which replace the parameters in `optimizer`'s groups; its state belongs to them.

    master: the dtype of the copies that it updates; None for the values themselves.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master: torch.dtype | None) -> None:
        self.optimizer, self.master = optimizer, master
        self.cut_anywhere = is_elementwise(type(optimizer))
        self.all: list[OptimizerSlice] = []
        self.factor = 1.0  # of the gradients in the next step, in the dtype of the update

    def add(self, bucket: ShardBucket, group_of: Sequence[int]) -> None:
        """Make slices of this rank's share of a bucket; `group_of` has a group for each parameter index."""
        limit = self._limit(bucket) if self.cut_anywhere else bucket.length
        for start, whole in bucket.ranges():
            for at in range(0, len(whole), limit):
                first = whole.start + at
                span = ParameterRange(whole.param_index, first, min(first + limit, whole.stop))
                value = bucket.share_of(bucket.values)[start + at : start + at + len(span)]
                if not self.cut_anywhere:
                    value = value.view(bucket.parameters[bucket.param_indices.index(span.param_index)].shape)
                tensor = value if self.master in (None, value.dtype) else value.to(self.master)
                group = group_of[span.param_index]
                self.all.append(OptimizerSlice(bucket, group, start + at, [span], value, tensor))
        self._hand_over()
        self.join()

    def _limit(self, bucket: ShardBucket) -> int:
        """Most elements of a slice."""
        return max(1, SLICE_BYTES // (self.master or bucket.values.dtype).itemsize)

    def _hand_over(self) -> None:
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
                    key: value[at:stop] if self.is_cut(key, value) else value
                    for key, value in self.optimizer.state.get(each.tensor, {}).items()
                }
                yield each, span, each.tensor.view(-1)[at:stop], state
                at = stop

    def is_cut(self, key: str, value: Any) -> bool:
        """Whether the state under `key` is cut along with the parameter."""
        return self.cut_anywhere and _has_elements(key, value)

    def regroup(self, key: Callable[[OptimizerSlice, ParameterRange, OptimizerState], Hashable]) -> None:
        """Cut and join slices so that neighbours with the same `key`, and no others, are one.

        Whole parameters stay as they are. Where slices are joined, the scalars of their states are equal.
        """
        if not self.cut_anywhere:
            return
        now = []
        for _, together in groupby(
            [*self.by_parameter()],
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
        self._hand_over()

    def _runs(self, parts: Sequence[RangeOfSlice]) -> Iterator[list[RangeOfSlice]]:
        """Cut neighbours into runs that are not longer than a slice may be, unless one range alone is."""
        limit, filled = self._limit(parts[0][0].bucket), 0
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
        start = first.start + sum(map(len, first.ranges[: first.ranges.index(ranges[0])]))
        value = first.bucket.share_of(first.bucket.values)[start : start + sum(map(len, ranges))]
        tensor = value if first.tensor is first.value else torch.cat([part for _, _, part, _ in run])
        state = {
            key: torch.cat([each[key] for *_, each in run]) if _has_elements(key, one) else _copied(one)
            for key, one in run[0][3].items()
        }
        if state:
            self.optimizer.state[tensor] = state
        return OptimizerSlice(first.bucket, first.group, start, ranges, value, tensor)

    def apart(self) -> None:
        """Make a slice of every range, so that each parameter has its own scalars."""
        self.regroup(lambda _, span, state: span.param_index)

    def join(self) -> None:
        """Make neighbours whose scalars agree one slice."""
        self.regroup(
            lambda _, span, state: tuple(
                (k, None if _has_elements(k, v) else float(v)) for k, v in sorted(state.items())
            )
        )

    def take(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take this rank's part of the states of whole parameters, given by parameter index."""
        self.apart()
        for each in self.all:
            (span,) = each.ranges
            if span.param_index in states:
                self.optimizer.state[each.tensor] = {
                    key: self._own_part(key, value, each, span)
                    for key, value in states[span.param_index].items()
                }
        self.join()

    def _own_part(self, key: str, value: Any, into: OptimizerSlice, span: ParameterRange) -> Any:
        if not isinstance(value, Tensor):
            return value
        if key == "step":  # keeps its device and precision
            return value.detach().clone()
        if self.is_cut(key, value):
            value = value.reshape(-1)[span.start : span.stop]
        dtype = into.tensor.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=into.tensor.device, dtype=dtype, copy=True)

    def step(self, used: Sequence[float], **options: Any) -> None:
        """Update the slices of parameters that had a gradient on any rank, and no others.

        options: for the optimizer's own step.
        """
        if not all(used) and any(0 < each.count(used) < len(each.ranges) for each in self.all):
            self.regroup(lambda each, span, _: (id(each), used[span.param_index] > 0))
        for each in self.all:
            grad = each.gradient() if each.count(used) else None
            each.tensor.grad = grad if grad is None or self.factor == 1 else grad.mul_(self.factor)
        self.factor = 1.0
        self.optimizer.step(**options)
        for each in self.all:
            if each.tensor.grad is not None and each.tensor is not each.value:
                each.value.copy_(each.tensor)
            each.tensor.grad = None

    def reload(self) -> bool:
        """After state was loaded: round masters to values and join what agrees; whether there are masters."""
        for state in self.optimizer.state.values():
            state.update({key: _copied(value) for key, value in state.items() if key in SCALARS})
        self.join()
        for each in self.all:
            if each.tensor is not each.value:
                each.value.copy_(each.tensor)
        return self.master is not None


def _has_elements(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in SCALARS


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
