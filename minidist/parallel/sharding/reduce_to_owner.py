"""Reduce gradients to their owners: a round ends with each rank's share of the sums.

What stays of the gradients is one of three (`GradientResidency`):

| | for | kept until the next step |
|---|---|---|
| own | stage 1 in a loop | this rank's whole gradients, in `grad`; buckets only carry them |
| buckets | stage 1 in an engine | the buckets, whose share the sums replace; `grad` is a view |
| shares | stage 2 | this rank's share of the sums alone, to which each backward pass adds |

With "shares" whole gradients are thrown away: `ShardAssignment.moved` sets `grad` to None once a gradient is
copied into its bucket, and `Bucket.reduce` gives the bucket's memory back after its reduce-scatter.

Source: Rajbhandari et al. 2020, "ZeRO" (see zero.py), sections 5.2 (bucketization) and 7.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from minidist.parallel.compression.compressor import all_reduce_bytes
from minidist.parallel.flat.buckets import Bucket, GradientMemory
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.sharding.bucket_assignment import GradientAssignment

TOTALS = 3
"""Numbers summed over the ranks with every round: rows, loss, and ranks for which it was the step's last."""
TRANSIENT = 2
"""Buckets that have memory at a time: one is filled while the one before it is sent."""
GradientResidency = Literal["own", "buckets", "shares"]
"""The gradients that a rank keeps after a round; see the table above."""


def lend_memory(buckets: Iterable[Bucket], gradient_comm: GradientComm) -> list[GradientMemory]:
    """Have the buckets take turns in memory for two of each dtype and device. A collective."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Bucket]] = {}
    for bucket in buckets:
        kinds.setdefault((bucket.dtype, bucket.device), []).append(bucket)
    made = []
    for (dtype, device), those in kinds.items():
        longest = max(bucket.length for bucket in those)
        count = min(TRANSIENT, len(those))
        memories = [GradientMemory(gradient_comm.zeros(longest, dtype, device)) for _ in range(count)]
        for number, bucket in enumerate(those):
            bucket.lend(memories[number % len(memories)])
        made += memories
    return made


class ShardAssignment(GradientAssignment):
    """Rounds that reduce gradients to their owners. Making it is a collective.

    buckets: hold all `parameters`, in the order in which they are sent. op: "mean" or "sum" over the ranks.
    before: the assignment of fewer parameters, which this one continues.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        gradient_comm: GradientComm,
        residency: GradientResidency,
        op: str,
        before: ShardAssignment | None = None,
    ) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        self.buckets, self.gradient_comm, self.residency = buckets, gradient_comm, residency
        self.sparse: list[nn.Parameter] = []  # sparse gradients are made dense
        self.tail_in_bucket, self.collects = False, residency == "buckets"
        self.tail = gradient_comm.zeros(len(parameters) + TOTALS, torch.float64, device)
        # Over all rounds since `begin`: on how many ranks each parameter had a gradient; rows and loss.
        self.used = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        if before is not None:
            self.used[: len(before.used)], self.totals = before.used, before.totals
        self.bucket_of, self._index = [-1] * len(parameters), [0] * len(parameters)
        for number, bucket in enumerate(buckets):
            bucket.op = op
            for index, param_index in enumerate(bucket.param_indices):
                self.bucket_of[param_index], self._index[param_index] = number, index
            if bucket.reduced is None and residency == "buckets":
                flat = gradient_comm.zeros(bucket.length, bucket.dtype, bucket.device)
                bucket.hold(flat)
                bucket.reduced = flat[bucket.own]
            elif bucket.reduced is None:
                bucket.reduced = torch.zeros_like(bucket.shard)
        self._memories = [] if residency == "buckets" else lend_memory(buckets, gradient_comm)

    def begin(self) -> None:
        """Forget the sums: the next round begins them anew."""
        for bucket in self.buckets:
            bucket.begun = False
        self.used.zero_()
        self.totals.zero_()

    def view(self, param_index: int) -> Tensor:
        """A parameter's part of its bucket, which gets memory if it has none."""
        bucket = self.buckets[self.bucket_of[param_index]]
        if not bucket.holds:
            bucket.borrow()
        return bucket.views[self._index[param_index]]

    def moved(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Drop the gradient that was copied into its bucket, or make it the copy."""
        if self.residency != "own":
            parameter.grad = view if self.residency == "buckets" else None

    def summed(self, unused: Sequence[int]) -> None:
        """Add up which parameters were used, rows and loss."""
        count = len(self.used)
        if self.residency != "shares":
            self.begin()
        self.used += self.tail[:count]
        self.totals += self.tail[count : count + 2]

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in (parameter for bucket in self.buckets for parameter in bucket.parameters):
            parameter.grad = None
        self.begin()

    def tensors(self) -> list[Tensor]:
        """All memory for gradients."""
        own = [bucket.gradients for bucket in self.buckets if bucket.holds]
        reduced = [bucket.reduced for bucket in self.buckets if bucket.reduced is not None]
        return [*(memory.flat for memory in self._memories), *own, *reduced]

    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a round: each bucket's reduction, and an all-reduce of the tail."""
        ranks = self.gradient_comm.ranks
        if ranks == 1:
            return 0
        return sum(b.reduce_bytes() for b in self.buckets) + all_reduce_bytes(8 * len(self.tail), ranks)
