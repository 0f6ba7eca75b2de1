"""Rounds that end with each rank's share: gradients are reduced to the rank that will use them.

In stage 1 a rank keeps its own gradients until the next step. In stage 2 a bucket has memory from its first
gradient to its reduce-scatter, memory that the next ones take again: what a rank keeps is its share, to which
each backward pass adds.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 5.2 (bucketization) and 7.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minidist.parallel.compression.compressor import Reduction, all_reduce_bytes
from minidist.parallel.flat.buckets import Done, GradientComm, PendingMessage
from minidist.parallel.sharding.bucket_assignment import RoundPlan
from minidist.parallel.sharding.zero_buckets import ShardBucket

TOTALS = 3
"""Numbers summed over the ranks with every round: rows, loss, and ranks for which it was the step's last."""
TRANSIENT = 2
"""Buckets that have memory at a time: one is filled while the one before it is sent."""


@dataclass(eq=False)
class _Memory:
    """Room for one bucket's gradients at a time."""

    flat: Tensor
    holder: int | None = None  # the bucket's number


class ShardPlan(RoundPlan):
    """The rounds of gradients in `buckets`. Making it is a collective.

    Args:
        parameters: whose gradients are summed.
        buckets: that hold all of them, in the order in which they are sent.
        exchange: the ranks.
        keep: what stays of gradients on this rank: "own", as they are, where they are; "buckets", in which a
            round puts the sums in this rank's share; "shares": nothing but the sums.
        op: "mean" or "sum" over the ranks.
        before: the plan of fewer parameters, which this one goes on with.

    Attributes:
        used: (parameters,), on how many ranks each had a gradient since `begin`, over all rounds.
        totals: (2,), rows and loss over these rounds.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[ShardBucket],
        exchange: GradientComm,
        keep: Literal["own", "buckets", "shares"],
        op: str,
        before: ShardPlan | None = None,
    ) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        self.buckets, self.exchange, self.keep, self.op = buckets, exchange, keep, op
        self.sparse: list[nn.Parameter] = []  # come dense
        self.tail_in_bucket, self.collects = False, keep == "buckets"
        self.tail = exchange.zeros(len(parameters) + TOTALS, torch.float64, device)
        self.used = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.fresh = True  # the next round begins the sums anew
        if before is not None:
            self.used[: len(before.used)], self.totals, self.fresh = before.used, before.totals, before.fresh
        self.bucket_of, self._index = [-1] * len(parameters), [0] * len(parameters)
        self._memories: dict[Any, list[_Memory]] = {}
        self._memory_of: list[_Memory] = []
        lengths: dict[Any, list[int]] = {}
        for number, bucket in enumerate(buckets):
            for index, place in enumerate(bucket.places):
                self.bucket_of[place], self._index[place] = number, index
            lengths.setdefault(_kind(bucket), []).append(bucket.length)
            if bucket.reduced is None:
                self._make_room(bucket)
        if keep != "buckets":
            for (dtype, on), each in lengths.items():
                count = min(TRANSIENT, len(each))
                self._memories[dtype, on] = [
                    _Memory(exchange.zeros(max(each), dtype, on)) for _ in range(count)
                ]
            taken = dict.fromkeys(lengths, 0)
            for bucket in buckets:
                memories = self._memories[_kind(bucket)]
                self._memory_of.append(memories[taken[_kind(bucket)] % len(memories)])
                taken[_kind(bucket)] += 1
        self.reductions: list[_ToOwners] = [_ToOwners(self, number) for number in range(len(buckets))]

    def _make_room(self, bucket: ShardBucket) -> None:
        values = bucket.values
        if self.keep == "buckets":
            gradients = self.exchange.zeros(bucket.length, values.dtype, values.device)
            bucket.hold(gradients)
            bucket.reduced = bucket.share_of(gradients)
        else:
            bucket.reduced = torch.zeros(bucket.share, dtype=values.dtype, device=values.device)

    def begin(self) -> None:
        """Forget the sums: the next round begins them anew."""
        self.fresh = True
        self.used.zero_()
        self.totals.zero_()

    def view(self, place: int) -> Tensor:
        """Where a parameter's gradient has to lie when its bucket is sent."""
        bucket = self.buckets[self.bucket_of[place]]
        if bucket.gradients is None:
            self._lend(self.bucket_of[place])
        return bucket.views[self._index[place]]

    def _lend(self, number: int) -> None:
        """Memory for a bucket's gradients."""
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
        bucket.gradients, bucket.views = None, []
        if memory.holder == number:
            memory.holder = None

    def moved(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Free the gradient that was copied, or have it be the copy."""
        if self.keep != "own":
            parameter.grad = view if self.keep == "buckets" else None

    def summed(self, unused: Sequence[int]) -> None:
        """See `RoundPlan.summed`."""
        count = len(self.used)
        if self.keep != "shares":
            self.begin()
        self.used += self.tail[:count]
        self.totals += self.tail[count : count + 2]
        self.fresh = self.keep != "shares"

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
        lent = [memory.flat for memories in self._memories.values() for memory in memories]
        held = [b.gradients for b in self.buckets if b.gradients is not None]
        return [*lent, *held, *(b.reduced for b in self.buckets if b.reduced is not None)]

    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a round: each bucket's reduce-scatter, and an all-reduce of the tail."""
        ranks = self.exchange.ranks
        if ranks == 1:
            return 0
        return sum(b.bytes_sent(ranks) for b in self.buckets) + all_reduce_bytes(8 * len(self.tail), ranks)


class _ToOwners(Reduction):
    """A reduce-scatter of one bucket."""

    def __init__(self, plan: ShardPlan, number: int) -> None:
        self._plan, self._number = plan, number
        self._work: PendingMessage | None = None

    def run(self) -> Iterator[PendingMessage]:
        plan, bucket = self._plan, self._plan.buckets[self._number]
        if not bucket.length:
            return
        if bucket.gradients is None:  # no gradient on this rank
            plan._lend(self._number)
        assert bucket.gradients is not None
        assert bucket.reduced is not None
        out = bucket.reduced if plan.fresh else bucket.share_of(bucket.gradients)
        if plan.exchange.ranks == 1:
            if out.data_ptr() != bucket.gradients.data_ptr():
                out.copy_(bucket.gradients)
            self._work = Done(out)
        else:
            self._work = plan.exchange.reduce_scatter(bucket.gradients, out, plan.op)
        yield self._work
        self.complete()

    def complete(self) -> None:
        """Wait, add to what earlier rounds brought, and give the memory back; once."""
        if self._work is None:
            return
        out, self._work = self._work.wait(), None
        bucket = self._plan.buckets[self._number]
        assert bucket.reduced is not None
        if not self._plan.fresh and out.data_ptr() != bucket.reduced.data_ptr():
            bucket.reduced.add_(out)
        if self._plan.keep != "buckets":
            self._plan.free(self._number)


def _kind(bucket: ShardBucket) -> tuple[torch.dtype, torch.device]:
    return bucket.values.dtype, bucket.values.device
