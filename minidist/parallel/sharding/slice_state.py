"""Slices of a rank's shares and their optimizer state: cut, joined, and loaded.

A slice ends where another parameter group begins, where the share ends, and between two neighbours of which
only one had a gradient in some step: their states differ from then on. A slice's state is cut with it, and
joined again where it agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.flat.bucket_layout import ParameterRange
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.memory_source import MemorySource
from minidist.parallel.training.clipping import Why, guard
from minidist.parallel.training.elementwise_optimizers import is_elementwise

SLICE_BYTES = 2**20
"""Most bytes of a slice, where parameters may be cut. On one core torch's AdamW took, in tensors of 1 MB or
of 0.5 MB, 0.47 of the time that 1.7 million elements in one tensor took; of 2 MB 0.92, of 0.13 MB 0.60."""
SCALARS = {"step", "mu_product", "eta", "mu"}
"""The keys of torch's optimizer state that hold one number for a parameter; all others have its shape."""
OptimizerState = dict[str, Any]


@dataclass(eq=False)
class OptimizerSlice:
    """Neighbouring elements of the share that the optimizer takes for one tensor."""

    bucket: Bucket
    group: int | None  # the number of the optimizer's group; None for what the optimizer leaves out
    start: int  # in the bucket's share
    ranges: list[ParameterRange]  # one after the other
    value: Tensor  # the elements, in the bucket
    tensor: nn.Parameter  # the optimizer updates this: a view of `value`, or a copy in the master dtype
    is_master: bool  # whether it is a copy

    def __len__(self) -> int:
        return sum(map(len, self.ranges))


RangeOfSlice = tuple[OptimizerSlice, ParameterRange, Tensor, OptimizerState]
"""A slice, one of its ranges, and that range's views of the updated tensor and of the state."""


class SliceState:
    """Slices that replace the parameters in `optimizer`'s groups; its state belongs to them.

    master: the dtype of the copies that it updates; None for the values themselves. memory: where copies and
    state lie.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, master: torch.dtype | None, memory: MemorySource | None = None
    ) -> None:
        self.optimizer, self.master, self.memory = optimizer, master, memory or MemorySource()
        self.cut_anywhere = is_elementwise(type(optimizer))
        self.all: list[OptimizerSlice] = []
        self._why: Why = lambda _: None

    def guarded_by(self, why: Why) -> None:
        """Have `clip_grad_norm` refuse the slices where `why` gives a reason."""
        self._why = why
        guard([each.tensor for each in self.all], why)

    def _slice(
        self,
        bucket: Bucket,
        group: int | None,
        start: int,
        ranges: list[ParameterRange],
        value: Tensor,
        master: Tensor | None,
    ) -> OptimizerSlice:
        """A slice of the elements in `value`; `master` has them in the master dtype, if they are known."""
        if self.master not in (None, value.dtype):
            master = self.memory.copy(value, self.master) if master is None else self.memory.keep(master)
        tensor = nn.Parameter(value if master is None else master)
        guard([tensor], self._why)
        return OptimizerSlice(bucket, group, start, ranges, value, tensor, master is not None)

    def _limit(self, bucket: Bucket) -> int:
        """Most elements of a slice."""
        return max(1, (self.memory.longest or SLICE_BYTES) // (self.master or bucket.dtype).itemsize)

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
                    key: value[at:stop] if self.is_cut(key, value) else value
                    for key, value in self.optimizer.state.get(each.tensor, {}).items()
                }
                yield each, span, each.tensor.detach().view(-1)[at:stop], state
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
        self.hand_over()

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
        value = first.bucket.shard[start : start + sum(map(len, ranges))]
        master = torch.cat([part for _, _, part, _ in run]) if first.is_master else None
        made = self._slice(first.bucket, first.group, start, ranges, value, master)
        state = {
            key: self.memory.keep(torch.cat([each[key] for *_, each in run]))
            if _has_elements(key, one)
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
        if self.cut_anywhere and key not in SCALARS:
            value = value.reshape(-1)[span.start : span.stop]
        dtype = into.tensor.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=into.tensor.device, dtype=dtype, copy=True)


def _has_elements(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and key not in SCALARS
