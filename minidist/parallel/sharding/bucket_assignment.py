"""The plan: which gradients share a bucket, agreed by all ranks after the first backward pass.

Registration order is only a guess at the order in which gradients come, and ranks may see different orders;
ranks whose buckets differ would add up gradients of different parameters. So rank 0's order holds for all.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section
3.2.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.compression.compressor import Compression, Reduction, all_reduce_bytes, elements_of
from minidist.parallel.flat.buckets import Bucket, GradientComm, cut, require_same

TOTALS = 2
"""Numbers that are summed over the ranks along with the gradients: rows and loss."""
TAIL_DTYPES = (torch.float32, torch.float64)
"""Dtypes of gradients among which these numbers, and counts of ranks, can be sent."""


class RoundPlan(ABC):
    """What a reducer has to know of a round: the messages, and which gradients each waits for.

    Attributes:
        reductions: how each bucket is reduced, in the order in which they are sent.
        bucket_of: for each parameter the number of the bucket that waits for it; -1 for none.
        sparse: parameters with sparse gradients, which are in no bucket.
        tail: for each parameter on how many ranks it was used, then the totals.
        tail_in_bucket: whether the tail is the end of the last bucket, or a message of its own.
        collects: whether gradients also go to their buckets where they are not sent yet.
    """

    reductions: Sequence[Reduction]
    bucket_of: list[int]
    sparse: Sequence[nn.Parameter]
    tail: Tensor
    tail_in_bucket: bool
    collects: bool = True

    @abstractmethod
    def view(self, place: int) -> Tensor | None:
        """Where a parameter's gradient has to lie when its bucket is sent; None where that is sparse."""

    def moved(self, parameter: nn.Parameter, view: Tensor) -> None:
        """A parameter's gradient has been copied into its bucket."""
        parameter.grad = view

    @abstractmethod
    def summed(self, unused: Sequence[int]) -> None:
        """All messages of a round are complete; this rank had no gradient for the parameters `unused`."""

    @abstractmethod
    def clear(self) -> None:
        """Drop the gradients, and what was kept back of them."""

    def waiting(self) -> list[int]:
        """For each bucket, how many gradients a backward pass brings before it is complete."""
        counts = [0] * len(self.reductions)
        for number in self.bucket_of:
            if number >= 0:
                counts[number] += 1
        return counts


class BucketAssignment(RoundPlan):
    """Buckets for the gradients of `parameters`, which stay in them. Making it is a collective.

    Args:
        named: the parameters and their names, the same on all ranks.
        seen: places of parameters in the order in which this rank's gradients came; rank 0's is what counts.
            Those that had none come last.
        exchange: the ranks.
        bucket_bytes: see `cut`.
        compression: what is done to a bucket.

    Attributes:
        order: places of parameters in the order in which gradients come.
        buckets: in the order in which they are sent.
        views: for each parameter where its gradient lies; None where that is sparse.

    Raises:
        ValueError: the ranks' parameters differ.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        seen: Iterable[int],
        exchange: GradientComm,
        bucket_bytes: int,
        compression: Compression,
    ) -> None:
        require_same("parameters", named, exchange.group)
        parameters = [parameter for _, parameter in named]
        device = parameters[0].device if parameters else torch.device("cpu")
        self.order = order = agree_on_order([*seen], len(parameters), exchange, device)
        is_sparse = [int(p.grad is not None and p.grad.is_sparse) for p in parameters]
        anywhere = comm.all_reduce(torch.tensor(is_sparse, device=device), "max", group=exchange.group)
        chosen = [place for place, is_one in enumerate(anywhere.tolist()) if is_one]
        self.sparse = [parameters[place] for place in chosen]

        parts = cut(parameters, [place for place in order if place not in chosen], bucket_bytes)
        numbers = len(parameters) + TOTALS
        self.tail_in_bucket = bool(parts) and has_tail(parameters, parts[-1], compression)
        self.buckets = []
        for places in parts:
            first, elements = parameters[places[0]], elements_of([parameters[place] for place in places])
            if places is parts[-1] and self.tail_in_bucket:
                elements += numbers
            if compression.compresses:  # something else is sent
                flat = torch.zeros(elements, dtype=first.dtype, device=first.device)
            else:
                flat = exchange.zeros(elements, first.dtype, first.device)
            self.buckets.append(Bucket.over(flat, parameters, places))
        if self.tail_in_bucket:
            self.tail = self.buckets[-1].flat[self.buckets[-1].elements :]
        else:
            self.tail = exchange.zeros(numbers, torch.float64, device)
        self.reductions = [
            compression.reduction(bucket, exchange, number) for number, bucket in enumerate(self.buckets)
        ]
        self._parameters, self._compression, self._ranks = parameters, compression, exchange.ranks
        self.views: list[Tensor | None] = [None] * len(parameters)
        self.bucket_of = [len(self.buckets) - 1] * len(parameters)  # the last waits for sparse gradients too
        for number, bucket in enumerate(self.buckets):
            for place, view in zip(bucket.places, bucket.views, strict=True):
                self.views[place], self.bucket_of[place] = view, number

    def view(self, place: int) -> Tensor | None:
        """See `RoundPlan.view`."""
        return self.views[place]

    def summed(self, unused: Sequence[int]) -> None:
        """Take the gradient from parameters that no rank used, so that the optimizer passes them over."""
        if not unused:
            return
        used = self.tail.tolist()
        for place in unused:
            if not used[place]:
                self._parameters[place].grad = None
            elif self.views[place] is not None:
                self._parameters[place].grad = self.views[place]

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients, and with `kept` what compression has kept back of them."""
        for bucket, reduction in zip(self.buckets, self.reductions, strict=True):
            bucket.flat[: bucket.elements].mul_(factor)
            if kept:
                reduction.rescale(factor)
        for parameter in self.sparse:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clear(self) -> None:
        """Drop the gradients, and what compression has kept back of them."""
        for bucket, reduction in zip(self.buckets, self.reductions, strict=True):
            bucket.flat.zero_()
            reduction.forget()

    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a round; sparse gradients not counted."""
        parts = [bucket.places for bucket in self.buckets]
        return round_bytes(self._parameters, parts, self._compression, self._ranks)


def has_tail(parameters: Sequence[Tensor], places: Sequence[int], compression: Compression) -> bool:
    """Whether the last bucket can carry the tail: counts have to arrive unchanged."""
    return not compression.compresses and parameters[places[0]].dtype in TAIL_DTYPES


def round_bytes(
    parameters: Sequence[Tensor], parts: Sequence[Sequence[int]], compression: Compression, ranks: int
) -> int:
    """Bytes that a rank sends in a round whose buckets hold the `parameters` at the places in `parts`."""
    if ranks == 1:
        return 0
    numbers, total = len(parameters) + TOTALS, 0
    for places in parts:
        together = [parameters[place] for place in places]
        more = 0
        if places is parts[-1] and has_tail(parameters, places, compression):
            more, numbers = numbers, 0
        total += compression.bytes_sent(together, ranks, more)
    return total + all_reduce_bytes(8 * numbers, ranks)


def agree_on_order(seen: list[int], count: int, exchange: GradientComm, device: torch.device) -> list[int]:
    """Rank 0's order of all parameters: as its gradients came; then, last registered first, those without."""
    missing = [place for place in reversed(range(count)) if place not in set(seen)]
    order = torch.tensor([*seen, *missing], dtype=torch.int64, device=device)
    comm.broadcast(order, source=0, group=exchange.group)
    agreed: list[int] = order.tolist()
    return agreed
