"""A round: gradients come to their buckets, buckets are reduced, and what the table does not keep is freed.

This is the one place where gradients are reduced, whatever the residency (residency.py). Two events lead
here: a gradient has arrived (reducer.py), or, where parameters are not whole, the backward pass has left a
unit (unit_runtime.py).

| What a rank keeps | Where gradients lie | A bucket's reduction |
|---|---|---|
| gradients and state whole | in buckets; `grad` is a view | all-reduce, or its compressed form |
| gradients whole, state 1/n | in buckets; the sums replace this rank's share | reduce-scatter |
| gradients 1/n | whole only until `Bucket.give_back`; the share of the sums stays | reduce-scatter |

A `ZeroOptimizer` of stage 1 leaves `grad` to the loop around it, so its buckets only carry copies.

Sources: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), section 3.2; Rajbhandari et al. 2020,
"ZeRO" (see zero.py), sections 5.2 (buckets) and 7.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from minidist.parallel.compression.compressor import Compression, Reduction, all_reduce_bytes
from minidist.parallel.flat.buckets import Bucket, GradientMemory
from minidist.parallel.flat.gradient_comm import GradientComm, Messages
from minidist.parallel.sharding.residency import Residency

TRANSIENT = 2
"""Buckets that have memory at a time where it is lent: one is filled while the one before it is sent."""
TAIL_DTYPES = (torch.float32, torch.float64)
"""Dtypes of gradients among which counts of ranks, rows and a loss can be sent."""


class GradientRounds:
    """The rounds of some parameters. Making it is a collective.

    parameters: by index. buckets: hold them all, in the order in which they are sent. op: "mean" or "sum"
    over the ranks, of reductions to owners. leaves_grad: `grad` stays as the backward pass left it. sparse:
    the indices of parameters in no bucket, whose gradients come as rows. total_count: how many numbers are
    summed along with a round. before: the rounds of fewer parameters, which these continue.

    Attributes:
        used: on how many ranks each parameter had a gradient, over all rounds since `begin`.
        totals, sums: weight and loss, added up since `begin`; every total of the last round alone.
        in_buckets: gradients stay in their buckets between backward passes.
        tail, tail_in_bucket: for each parameter the number of ranks that used it, then the totals; whether
            this is the end of the last bucket, or a message of its own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        gradient_comm: GradientComm,
        residency: Residency,
        op: str = "sum",
        leaves_grad: bool = False,
        compression: Compression | None = None,
        sparse: Sequence[int] = (),
        total_count: int = 2,
        before: GradientRounds | None = None,
    ) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        self.parameters, self.buckets, self.gradient_comm = parameters, [*buckets], gradient_comm
        self.residency, self.compression = residency, compression
        self.leaves_grad = leaves_grad
        self.in_buckets = residency.parameters and residency.gradients and not leaves_grad
        self.sparse = [parameters[index] for index in sparse]
        # Sparse gradients wait for the last bucket.
        self.bucket_of, self._at = [len(self.buckets) - 1] * len(parameters), [-1] * len(parameters)
        for number, bucket in enumerate(self.buckets):
            bucket.op = op
            for at, index in enumerate(bucket.param_indices):
                self.bucket_of[index], self._at[index] = number, at
        tail_length = len(parameters) + total_count
        self.tail_in_bucket = (
            residency.state
            and bool(self.buckets)
            and compression is None
            and self.buckets[-1].dtype in TAIL_DTYPES
        )
        self.memories: list[GradientMemory] = []
        self._make_memory(tail_length)
        if not self.tail_in_bucket:
            self.tail = gradient_comm.zeros(tail_length, torch.float64, device)
        self.reductions: list[Reduction] = []  # of compression, for each bucket
        for number, bucket in enumerate(self.buckets) if residency.state else ():
            bucket.everyone = gradient_comm
            if compression is not None:
                self.reductions.append(compression.reduction(bucket, gradient_comm, number))
                bucket.reduction = self.reductions[-1].run
        self.used = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.sums = torch.zeros(total_count, dtype=torch.float64, device=device)
        if before is not None:
            self.used[: len(before.used)], self.totals = before.used, before.totals

    def _make_memory(self, tail_length: int) -> None:
        """Give each bucket memory of its own if gradients stay there; otherwise have buckets take turns."""
        if not self.in_buckets:
            for bucket in self.buckets:
                if bucket.reduced is None:
                    bucket.reduced = torch.zeros_like(bucket.shard)
            self.memories = lend_memory(self.buckets, self.gradient_comm)
            return
        for bucket in self.buckets:
            if bucket.holds:
                continue
            length = bucket.length
            if bucket is self.buckets[-1] and self.tail_in_bucket:
                length += tail_length
            if self.compression is not None:  # the bucket itself is not sent
                flat = torch.zeros(length, dtype=bucket.dtype, device=bucket.device)
            else:
                flat = self.gradient_comm.zeros(length, bucket.dtype, bucket.device)
            bucket.hold(flat)
            self.tail = flat[bucket.length :]
            if not self.residency.state:
                bucket.reduced = flat[bucket.own]

    # Before a bucket is reduced: its gradients come to it.

    def view(self, param_index: int) -> Tensor | None:
        """Where a parameter's gradient lies when its bucket is sent; None where it is sparse."""
        if self._at[param_index] < 0:
            return None
        bucket = self.buckets[self.bucket_of[param_index]]
        if not bucket.holds:
            bucket.borrow()
        return bucket.views[self._at[param_index]]

    def place(self, param_index: int, scale: float) -> None:
        """Bring a gradient to its bucket, multiplied by `scale`; a sparse one that is in none stays."""
        parameter, view = self.parameters[param_index], self.view(param_index)
        grad = parameter.grad
        if view is None or grad is None:
            return
        if grad.requires_grad:  # of backward(create_graph=True)
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        if scale != 1:
            torch.mul(grad, scale, out=view)  # one pass instead of one to copy and one to divide
        elif grad is not view:
            view.copy_(grad)
        if grad is not view and not self.leaves_grad:
            parameter.grad = view if self.in_buckets else None

    def waiting(self) -> list[int]:
        """For each bucket, and last for none, how many gradients a backward pass brings to it."""
        counts = [0] * (len(self.buckets) + 1)
        for number in self.bucket_of:
            counts[number] += 1
        return counts

    # The end of a round: who used what, and the totals.

    def fill_tail(self, unused: Iterable[int], totals: Iterable[float | Tensor]) -> None:
        """Note which parameters this rank used, and its totals."""
        count = len(self.parameters)
        self.tail[:count], self.tail[count:] = 1.0, 0.0
        for position, value in (*((index, 0.0) for index in unused), *enumerate(totals, count)):
            self.tail[position] = value

    def send_tail(self) -> Messages:
        """Launch the sum of the tail over the ranks, where no bucket carries it."""
        return Messages(iter([self.gradient_comm.all_reduce(self.tail, blocking=True)]))

    def summed(self, unused: Sequence[int]) -> None:
        """React to a complete round, in which this rank had no gradient for the parameters `unused`."""
        count = len(self.parameters)
        self.sums = self.tail[count:]
        if self.residency.state:
            self._drop_unused(unused)
            return
        if self.residency.gradients:  # the sums of this round are all
            self.begin()
        self.used += self.tail[:count]
        self.totals += self.tail[count : count + 2]

    def _drop_unused(self, unused: Sequence[int]) -> None:
        """Set the gradient of parameters that no rank used to None, so that the optimizer skips them."""
        if not unused:
            return
        used = self.tail.tolist()
        for index in unused:
            if not used[index]:
                self.parameters[index].grad = None
            elif (view := self.view(index)) is not None:
                self.parameters[index].grad = view

    def begin(self) -> None:
        """Forget the sums: the next round begins them anew."""
        for bucket in self.buckets:
            bucket.begun = False
        self.used.zero_()
        self.totals.zero_()

    def clear(self) -> None:
        """Drop the gradients, and what compression has kept back of them."""
        for reduction in self.reductions:
            reduction.forget()
        for bucket in self.buckets:
            if self.residency.state:
                bucket.gradients.zero_()
                continue
            for parameter in bucket.parameters:
                parameter.grad = None
        self.begin()

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients in the buckets, and with `kept` what compression has kept back of them."""
        for bucket in self.buckets:
            bucket.gradients[: bucket.elements].mul_(factor)
        for reduction in self.reductions if kept else ():
            reduction.rescale(factor)
        for parameter in self.sparse:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    # What it holds and sends.

    def tensors(self) -> list[Tensor]:
        """All memory for gradients."""
        own = [bucket.gradients for bucket in self.buckets if bucket.holds]
        reduced = [bucket.reduced for bucket in self.buckets if bucket.reduced is not None]
        return [*(memory.flat for memory in self.memories), *own, *reduced]

    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a round, without sparse gradients."""
        ranks = self.gradient_comm.ranks
        if ranks == 1:
            return 0
        sent = 0 if self.tail_in_bucket else all_reduce_bytes(8 * len(self.tail), ranks)
        if not self.residency.state:
            return sum(bucket.reduce_bytes() for bucket in self.buckets) + sent
        for bucket in self.buckets:
            if self.compression is None:
                sent += all_reduce_bytes(bucket.gradients.nbytes, ranks)
            else:
                sent += self.compression.bytes_sent(bucket.parameters, ranks)
        return sent


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
