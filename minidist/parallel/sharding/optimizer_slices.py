"""This rank's optimizer slices: what a step does with them.

Few long tensors cost an optimizer fewer calls than many short ones. But what it computes on one has to stay
in a core's cache from one operation to the next, hence `slice_state.SLICE_BYTES`.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.1 (each rank updates its part).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.flat.bucket_layout import ParameterRange
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.slice_state import SCALARS, SliceState


class OptimizerSlices(SliceState):
    """The slices of this rank's shares of some buckets."""

    def add(self, bucket: Bucket, group_of: Mapping[int, int]) -> None:
        """Make slices of this rank's share of a bucket; `group_of` has a group for each parameter index."""
        limit = self._limit(bucket) if self.cut_anywhere else bucket.length
        for start, whole in bucket.ranges():
            for at in range(0, len(whole), limit):
                first = whole.start + at
                span = ParameterRange(whole.param_index, first, min(first + limit, whole.stop))
                value = bucket.shard[start + at : start + at + len(span)]
                if not self.cut_anywhere:
                    value = value.view(bucket.shapes[bucket.param_indices.index(span.param_index)])
                group = group_of.get(span.param_index)
                self.all.append(self._slice(bucket, group, start + at, [span], value, None))
        self.hand_over()
        self.join()

    # A step: gradients, the optimizer's own step, values.

    def give_gradients(self, used: Sequence[float]) -> None:
        """Give slices their reduced gradients; None to those of parameters that no rank used."""
        counts = [sum(used[span.param_index] > 0 for span in each.ranges) for each in self.all]
        if any(0 < count < len(each.ranges) for count, each in zip(counts, self.all, strict=True)):
            self.regroup(lambda each, span, _: (id(each), used[span.param_index] > 0))
        for each in self.all:
            reduced, tensor, grad = each.bucket.reduced, each.tensor, None
            if reduced is not None and used[each.ranges[0].param_index] > 0:  # as all of the slice's
                grad = reduced[each.start : each.start + each.value.numel()].view(tensor.shape)
            tensor.grad = grad if grad is None else grad.to(tensor.dtype)

    def gradients(self) -> list[Tensor]:
        """The gradients that were given."""
        return [each.tensor.grad for each in self.all if each.tensor.grad is not None]

    def masters(self) -> list[Tensor]:
        """The copies in the master dtype."""
        return [each.tensor for each in self.all if each.is_master]

    def step(self, **options: Any) -> Any:
        """Update the slices; `round_masters` comes next. `options` are for the optimizer's own step."""
        if self.memory.longest is None or "closure" in options:  # which needs the gradients of all slices
            return self.optimizer.step(**options)
        return self._step_one_by_one(**options)

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
                    state.update({k: self.memory.keep(v) for k, v in state.items() if self.is_cut(k, v)})
        finally:
            self.hand_over()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round masters to the values."""
        for each in self.all:
            if each.is_master:
                each.value.copy_(each.tensor)

    @torch.no_grad()
    def overwrite(self, bucket: Bucket, shard: Tensor) -> None:
        """Take new values for this rank's share of a bucket; masters change only where the values do."""
        for each in self.all:
            if each.bucket is bucket and each.is_master:
                new = shard[each.start : each.start + len(each)]
                each.tensor.copy_(torch.where(new == each.value, each.tensor, new.to(each.tensor.dtype)))
        bucket.shard.copy_(shard)

    def drop_gradients(self) -> None:
        """Forget the gradients that were given."""
        for each in self.all:
            each.tensor.grad = None

    def reload(self) -> bool:
        """After state was loaded: round masters and join what agrees; returns whether there are masters."""
        for state in self.optimizer.state.values():
            tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
            state.update({k: v.clone() for k, v in tensors.items() if k in SCALARS or not v.dim()})
        self.join()
        self.round_masters()
        return self.master is not None
