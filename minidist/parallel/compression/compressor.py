"""The interface of a compression, and the one that keeps every element: 16-bit numbers.

`DataParallel` asks a `Compression` for one `Reduction` for each bucket. The reduction sums the bucket's
gradients over the ranks, and keeps what it needs from one step to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.parallel.flat.gradients import GradientComm, PendingMessage

Views = Sequence[Tensor]
"""Each parameter's part of a bucket's flat gradients."""


class Reduction(ABC):
    """How one bucket's gradients are summed over the ranks, and what is kept from one step to the next."""

    error: Tensor | None = None  # error feedback: what earlier steps did not send, added to the next gradient

    @abstractmethod
    def run(self) -> Iterator[PendingMessage]:
        """Replace the gradients in the bucket by their sum over the ranks, in steps.

        It yields each message as soon as the message is under way, and is resumed when it is complete; the
        backward pass continues in between. It yields the same number of messages on every rank.
        """

    def rescale(self, factor: float) -> None:
        """Multiply what error feedback has left over from earlier gradients."""
        if self.error is not None:
            self.error.mul_(factor)

    def forget(self) -> None:
        """Drop what error feedback has left over from earlier gradients."""
        if self.error is not None:
            self.error.zero_()


class Compression(ABC):
    """Makes the reduction of each bucket.

    reads_values: whether values of gradients decide what is sent, so that a dry run cannot tell.
    """

    reads_values = False

    @abstractmethod
    def reduction(self, flat: Tensor, views: Views, over: GradientComm, number: int) -> Reduction:
        """Make the reduction of the gradients of bucket `number`, which lie in `flat`."""

    @abstractmethod
    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int) -> int:
        """Return the bytes that a rank sends for a bucket of `tensors`."""


@dataclass(frozen=True)
class Cast(Compression):
    """All-reduces in a dtype of 2 bytes: half of float32's, a quarter of float64's.

    A sum's relative error is about n roundings of 2^-11 (float16) or 2^-8 (bfloat16). float16 turns gradients
    below 6e-8 into zero and those above 65504 into infinity: scale the loss if there are any.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {self.dtype}; give torch.float16 or torch.bfloat16")

    def reduction(self, flat: Tensor, views: Views, over: GradientComm, number: int) -> Reduction:
        """An all-reduce of a rounded copy."""
        return _Rounded(flat, over, self.dtype)

    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int) -> int:
        """2 (n - 1) / n of 2 bytes an element."""
        return all_reduce_bytes(2 * elements_of(tensors), ranks)


class _Rounded(Reduction):
    def __init__(self, flat: Tensor, gradient_comm: GradientComm, dtype: torch.dtype) -> None:
        self._flat, self._gradient_comm = flat, gradient_comm
        self._wire = gradient_comm.zeros(len(flat), dtype, flat.device)

    def run(self) -> Iterator[PendingMessage]:
        self._wire.copy_(self._flat)
        yield self._gradient_comm.all_reduce(self._wire)
        self._flat.copy_(self._wire)


def elements_of(tensors: Sequence[Tensor]) -> int:
    """Return how many numbers the tensors hold together."""
    return sum(tensor.numel() for tensor in tensors)
