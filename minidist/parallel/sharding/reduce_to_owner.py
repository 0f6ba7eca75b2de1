"""Reduce gradients to their owners: a round ends with each rank's share of the sums.

What stays of the gradients is one of three (`GradientResidency`):

| | for | kept until the next step |
|---|---|---|
| own | stage 1 in a loop | this rank's whole gradients, in `grad`; buckets only carry them |
| buckets | stage 1 in an engine | the buckets, in which the sums replace this rank's share; `grad` is a view
|
| shares | stage 2 | this rank's share of the sums alone, to which each backward pass adds |

With "shares" whole gradients are thrown away: `ShardAssignment.moved` sets `grad` to None once a gradient is
copied into its bucket, and `_ToOwners.complete` takes the bucket's memory back after its reduce-scatter.

Source: Rajbhandari et al. 2020, "ZeRO" (see zero.py), sections 5.2 (bucketization) and 7.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from minidist.parallel.compression.compressor import Reduction, all_reduce_bytes
from minidist.parallel.flat.buckets import Done, GradientComm, PendingMessage
from minidist.parallel.sharding.bucket_assignment import GradientAssignment
from minidist.parallel.sharding.zero_buckets import ShardBucket

TOTALS = 3
"""Numbers summed over the ranks with every round: rows, loss, and ranks for which it was the step's last."""
TRANSIENT = 2
"""Buckets that have memory at a time: one is filled while the one before it is sent."""
GradientResidency = Literal["own", "buckets", "shares"]
"""The gradients that a rank keeps after a round; see the table above."""


@dataclass(eq=False)
class _Memory:
    """Room for the gradients of one bucket at a time."""

    flat: Tensor
    holder: int | None = None  # the bucket's number


class ShardAssignment(GradientAssignment):
    """Rounds that reduce gradients to their owners. Making it is a collective.

    buckets: hold all `parameters`, in the order in which they are sent. op: "mean" or "sum" over the ranks.
    before: the assignment of fewer parameters, which this one continues.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[ShardBucket],
        gradient_comm: GradientComm,
        residency: GradientResidency,
        op: str,
        before: ShardAssignment | None = None,
    ) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        self.buckets, self.gradient_comm, self.residency, self.op = buckets, gradient_comm, residency, op
        self.sparse: list[nn.Parameter] = []  # sparse gradients are made dense
        self.tail_in_bucket, self.collects = False, residency == "buckets"
        self.tail = gradient_comm.zeros(len(parameters) + TOTALS, torch.float64, device)
        # Over all rounds since `begin`: on how many ranks each parameter had a gradient; rows and loss.
        self.used = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.fresh = True  # the next round begins the sums anew
        if before is not None:
            self.used[: len(before.used)], self.totals, self.fresh = before.used, before.totals, before.fresh
        self.bucket_of, self._index = [-1] * len(parameters), [0] * len(parameters)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}  # the numbers of the buckets of each
        for number, bucket in enumerate(buckets):
            for index, param_index in enumerate(bucket.param_indices):
                self.bucket_of[param_index], self._index[param_index] = number, index
            kinds.setdefault((bucket.values.dtype, bucket.values.device), []).append(number)
            if bucket.reduced is None and residency == "buckets":
                flat = gradient_comm.zeros(bucket.length, bucket.values.dtype, bucket.values.device)
                bucket.hold(flat)
                bucket.reduced = bucket.share_of(flat)
            elif bucket.reduced is None:
                bucket.reduced = torch.zeros_like(bucket.share_of(bucket.values))
        self._memory_of: dict[int, _Memory] = {}
        for (dtype, on), numbers in kinds.items() if residency != "buckets" else ():
            longest, count = max(buckets[number].length for number in numbers), min(TRANSIENT, len(numbers))
            memories = [_Memory(gradient_comm.zeros(longest, dtype, on)) for _ in range(count)]
            self._memory_of |= {number: memories[i % count] for i, number in enumerate(numbers)}
        self.reductions: list[_ToOwners] = [_ToOwners(self, number) for number in range(len(buckets))]

    def begin(self) -> None:
        """Forget the sums: the next round begins them anew."""
        self.fresh = True
        self.used.zero_()
        self.totals.zero_()

    def view(self, param_index: int) -> Tensor:
        """A parameter's part of its bucket, which gets memory if it has none."""
        bucket = self.buckets[self.bucket_of[param_index]]
        if bucket.gradients is None:
            self._lend(self.bucket_of[param_index])
        return bucket.views[self._index[param_index]]

    def _lend(self, number: int) -> None:
        """Give a bucket memory for its gradients."""
        bucket, memory = self.buckets[number], self._memory_of[number]
        if memory.holder is not None:
            self.reductions[memory.holder].complete()
        if memory.holder is None:
            memory.holder = number
            bucket.hold(memory.flat[: bucket.length])
        else:  # gradients come in another order than in the first pass, and the holder still lacks some
            bucket.hold(torch.zeros(bucket.length, dtype=bucket.values.dtype, device=bucket.values.device))

    def free(self, number: int) -> None:
        """Take a bucket's memory back."""
        bucket, memory = self.buckets[number], self._memory_of[number]
        bucket.gradients, bucket.views = None, ()
        if memory.holder == number:
            memory.holder = None

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
        self.fresh = self.residency != "shares"

    def clear(self) -> None:
        """Drop the gradients."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self.begin()

    def rescale(self, factor: float) -> None:
        """Multiply this rank's share of the sums."""
        for bucket in self.buckets:
            assert bucket.reduced is not None
            bucket.reduced.mul_(factor)

    def tensors(self) -> list[Tensor]:
        """All memory for gradients."""
        held = [tensor for b in self.buckets for tensor in (b.gradients, b.reduced) if tensor is not None]
        return [*(memory.flat for memory in self._memory_of.values()), *held]

    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a round: each bucket's reduce-scatter, and an all-reduce of the tail."""
        ranks = self.gradient_comm.ranks
        if ranks == 1:
            return 0
        return sum(b.bytes_sent(ranks) for b in self.buckets) + all_reduce_bytes(8 * len(self.tail), ranks)


class _ToOwners(Reduction):
    """A reduce-scatter of one bucket."""

    def __init__(self, assignment: ShardAssignment, number: int) -> None:
        self._assignment, self._number = assignment, number
        self._work: PendingMessage | None = None

    def run(self) -> Iterator[PendingMessage]:
        assignment, bucket = self._assignment, self._assignment.buckets[self._number]
        if not bucket.length:
            return
        if bucket.gradients is None:  # no gradient on this rank
            assignment._lend(self._number)
        assert bucket.gradients is not None
        assert bucket.reduced is not None
        out = bucket.reduced if assignment.fresh else bucket.share_of(bucket.gradients)
        if assignment.gradient_comm.ranks == 1:
            if out.data_ptr() != bucket.gradients.data_ptr():
                out.copy_(bucket.gradients)
            self._work = Done(out)
        else:
            self._work = assignment.gradient_comm.reduce_scatter(bucket.gradients, out, assignment.op)
        yield self._work
        self.complete()

    def complete(self) -> None:
        """Wait, add to the sums of earlier rounds, and give the memory back. A second call does nothing."""
        if self._work is None:
            return
        out, self._work = self._work.wait(), None
        bucket = self._assignment.buckets[self._number]
        assert bucket.reduced is not None
        if not self._assignment.fresh and out.data_ptr() != bucket.reduced.data_ptr():
            bucket.reduced.add_(out)
        if self._assignment.residency != "buckets":
            self._assignment.free(self._number)
