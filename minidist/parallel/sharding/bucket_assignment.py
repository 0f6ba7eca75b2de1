"""Which gradients share a bucket, agreed by all ranks after the first backward pass.

Registration order is only a guess at the order in which gradients come, and ranks may see different orders.
If the ranks' buckets differed, they would add up gradients of different parameters. So rank 0's order holds
for all.

Source: Li et al. 2020, "PyTorch Distributed" (see data_parallel.py), section 3.2.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.compression.compressor import Compression, all_reduce_bytes, elements_of
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.flat.joined_messages import MB, cut, require_same

TOTALS = 2
"""Numbers that are summed over the ranks along with the gradients: rows and loss."""
TAIL_DTYPES = (torch.float32, torch.float64)
"""Dtypes of gradients among which these totals, and counts of ranks, can be sent."""


class GradientAssignment(ABC):
    """The buckets of a `Reducer`'s rounds, and which gradients each waits for."""

    buckets: Sequence[Bucket]  # in the order in which they are sent
    bucket_of: list[int]  # for each parameter the number of the bucket that waits for it; -1 for none
    sparse: Sequence[nn.Parameter]  # have sparse gradients, and are in no bucket
    tail: Tensor  # for each parameter the number of ranks that used it, then the totals
    tail_in_bucket: bool  # whether the tail is the end of the last bucket, or a message of its own
    collects: bool = True  # whether gradients go to their buckets even in backward passes that send nothing

    @abstractmethod
    def view(self, param_index: int) -> Tensor | None:
        """Where a parameter's gradient has to lie when its bucket is sent; None where it is sparse."""

    def moved(self, parameter: nn.Parameter, view: Tensor) -> None:
        """React to a gradient that has been copied into its bucket: `grad` becomes the copy."""
        parameter.grad = view

    def fill_tail(self, unused: Iterable[int], totals: Iterable[float | Tensor]) -> None:
        """Note which parameters this rank used, and its totals."""
        count = len(self.bucket_of)
        self.tail[:count], self.tail[count:] = 1.0, 0.0
        for position, value in (*((index, 0.0) for index in unused), *enumerate(totals, count)):
            self.tail[position] = value

    @abstractmethod
    def summed(self, unused: Sequence[int]) -> None:
        """React to a complete round, in which this rank had no gradient for the parameters `unused`."""

    @abstractmethod
    def clear(self) -> None:
        """Drop the gradients, and what compression has kept back of them."""

    def waiting(self) -> list[int]:
        """For each bucket, and last for none, how many gradients a backward pass brings to it."""
        counts = [0] * (len(self.buckets) + 1)
        for number in self.bucket_of:
            counts[number] += 1
        return counts


class BucketAssignment(GradientAssignment):
    """Buckets in which every rank keeps the whole gradients. Making it is a collective.

    seen: parameter indices in the order in which this rank's gradients came; rank 0's order counts.
    Parameters without a gradient come last.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        seen: Iterable[int],
        gradient_comm: GradientComm,
        bucket_bytes: int,
        compression: Compression,
    ) -> None:
        require_same("parameters", named, gradient_comm.group)
        parameters = [parameter for _, parameter in named]
        device = parameters[0].device if parameters else torch.device("cpu")
        self.order = agree_on_order([*seen], len(parameters), gradient_comm, device)
        is_sparse = [int(p.grad is not None and p.grad.is_sparse) for p in parameters]
        anywhere = comm.all_reduce(torch.tensor(is_sparse, device=device), "max", group=gradient_comm.group)
        chosen = [index for index, is_one in enumerate(anywhere.tolist()) if is_one]
        self.sparse = [parameters[index] for index in chosen]

        parts = cut(parameters, [index for index in self.order if index not in chosen], bucket_bytes)
        tail_length = len(parameters) + TOTALS
        self.tail_in_bucket = bool(parts) and has_tail(parameters, parts[-1], compression)
        self.buckets: list[Bucket] = []
        for indices in parts:
            first, elements = parameters[indices[0]], elements_of([parameters[index] for index in indices])
            if indices is parts[-1] and self.tail_in_bucket:
                elements += tail_length
            if compression.compresses:  # the bucket itself is not sent
                flat = torch.zeros(elements, dtype=first.dtype, device=first.device)
            else:
                flat = gradient_comm.zeros(elements, first.dtype, first.device)
            self.buckets.append(Bucket(indices, parameters))
            self.buckets[-1].hold(flat)
        if self.tail_in_bucket:
            self.tail = flat[self.buckets[-1].elements :]
        else:
            self.tail = gradient_comm.zeros(tail_length, torch.float64, device)
        self.reductions = [
            compression.reduction(bucket, gradient_comm, number) for number, bucket in enumerate(self.buckets)
        ]
        for bucket, reduction in zip(self.buckets, self.reductions, strict=True):
            bucket.messages = reduction.run  # an all-reduce, or its compressed form
        self._parameters, self._compression, self._ranks = parameters, compression, gradient_comm.ranks
        self.views: list[Tensor | None] = [None] * len(parameters)  # of the gradients; None for sparse ones
        self.bucket_of = [len(self.buckets) - 1] * len(parameters)  # the last also waits for sparse gradients
        for number, bucket in enumerate(self.buckets):
            for index, view in zip(bucket.param_indices, bucket.views, strict=True):
                self.views[index], self.bucket_of[index] = view, number

    def view(self, param_index: int) -> Tensor | None:
        """A parameter's part of its bucket; None for sparse gradients."""
        return self.views[param_index]

    def summed(self, unused: Sequence[int]) -> None:
        """Set the gradient of parameters that no rank used to None, so that the optimizer skips them."""
        if not unused:
            return
        used = self.tail.tolist()
        for index in unused:
            if not used[index]:
                self._parameters[index].grad = None
            elif self.views[index] is not None:
                self._parameters[index].grad = self.views[index]

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients, and with `kept` what compression has kept back of them."""
        for bucket, reduction in zip(self.buckets, self.reductions, strict=True):
            bucket.gradients[: bucket.elements].mul_(factor)
            if kept:
                reduction.rescale(factor)
        for parameter in self.sparse:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clear(self) -> None:
        """Drop the gradients, and what compression has kept back of them."""
        for bucket, reduction in zip(self.buckets, self.reductions, strict=True):
            bucket.gradients.zero_()
            reduction.forget()

    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a round, without sparse gradients."""
        parts = [bucket.param_indices for bucket in self.buckets]
        return round_bytes(self._parameters, parts, self._compression, self._ranks)


def has_tail(parameters: Sequence[Tensor], param_indices: Sequence[int], compression: Compression) -> bool:
    """Whether the last bucket can carry the tail, whose counts have to arrive unchanged."""
    return not compression.compresses and parameters[param_indices[0]].dtype in TAIL_DTYPES


def round_bytes(
    parameters: Sequence[Tensor], parts: Sequence[Sequence[int]], compression: Compression, ranks: int
) -> int:
    """Bytes that a rank sends in a round whose buckets hold the `parameters` at the indices in `parts`."""
    if ranks == 1:
        return 0
    tail_length, total = len(parameters) + TOTALS, 0
    for indices in parts:
        together = [parameters[index] for index in indices]
        more = 0
        if indices is parts[-1] and has_tail(parameters, indices, compression):
            more, tail_length = tail_length, 0
        total += compression.bytes_sent(together, ranks, more)
    return total + all_reduce_bytes(8 * tail_length, ranks)


def bytes_per_step(
    model: nn.Module, ranks: int, bucket_mb: float = 25, compression: str | Compression | None = None
) -> int:
    """Bytes that a rank sends in a step, predicted without a step; see `DataParallel.bytes_per_step`.

    It assumes that gradients come in the reverse of the order in which parameters are registered. Otherwise
    other gradients share a bucket, and each bucket's division may round differently.
    """
    parameters = trainable(model)
    parts = cut(parameters, reversed(range(len(parameters))), int(bucket_mb * MB))
    return round_bytes(parameters, parts, compression_of(compression), ranks)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, each once even if two layers share it."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def agree_on_order(
    seen: list[int], count: int, gradient_comm: GradientComm, device: torch.device
) -> list[int]:
    """Rank 0's order of all parameters: as its gradients came; then, last registered first, those without."""
    missing = [index for index in reversed(range(count)) if index not in set(seen)]
    order = torch.tensor([*seen, *missing], dtype=torch.int64, device=device)
    comm.broadcast(order, source=0, group=gradient_comm.group)
    agreed: list[int] = order.tolist()
    return agreed
