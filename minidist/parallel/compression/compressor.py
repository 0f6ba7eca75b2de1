"""Compression: fewer bytes for a bucket's gradients, at the price of their being rounded, or late.

`DataParallel(compression=...)` takes a name or one of the objects:

| Name | Object | What is sent |
|---|---|---|
| "float16", "bfloat16" | `Cast(dtype)` | every element, rounded to 2 bytes |
| "topk" | `TopK(ratio)` | the largest elements and their places |
| "powersgd" | `PowerSGD(rank)` | two thin factors of each matrix |

The last two leave most of a gradient out, and add what they left out to the next one: error feedback.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist._names import unknown
from minidist.comm.work import bytes_of
from minidist.parallel.flat.buckets import Bucket, GradientComm, PendingMessage


class Reduction(ABC):
    """How one bucket's gradients are summed over the ranks; keeps what it needs from one step to the next."""

    @abstractmethod
    def run(self) -> Iterator[PendingMessage]:
        """Replace the gradients in the bucket by their sum over the ranks, in steps.

        It yields each message as soon as that is on its way, and is resumed when it is complete: backward
        goes on in between. It yields as many on every rank.
        """

    def rescale(self, factor: float) -> None:  # noqa: B027 - most keep nothing
        """Multiply what was kept back of former gradients."""

    def forget(self) -> None:  # noqa: B027
        """Drop what was kept back of former gradients."""


class Compression(ABC):
    """Makes each bucket's reduction."""

    compresses = True
    """Whether anything is lost: if so, counts that have to be exact are sent apart."""

    @abstractmethod
    def reduction(self, bucket: Bucket, exchange: GradientComm, number: int) -> Reduction:
        """How bucket `number` is reduced."""

    @abstractmethod
    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int, more: int = 0) -> int:
        """Bytes that a rank sends for a bucket of gradients of `tensors`, and `more` elements at its end."""


@dataclass(frozen=True)
class NoCompression(Compression):
    """All-reduce the bucket where it lies."""

    compresses = False

    def reduction(self, bucket: Bucket, exchange: GradientComm, number: int) -> Reduction:
        """An all-reduce in place."""
        return _InPlace(bucket, exchange)

    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int, more: int = 0) -> int:
        """2 (n - 1) / n of the bucket."""
        return all_reduce_bytes(sum(map(bytes_of, tensors)) + more * tensors[0].element_size(), ranks)


@dataclass(frozen=True)
class Cast(Compression):
    """All-reduce in a dtype of 2 bytes: half of float32's, a quarter of float64's.

    A sum's relative error is about n roundings of 2^-11 (float16) or 2^-8 (bfloat16). float16 takes
    gradients below 6e-8 for zero and those above 65504 for infinity: scale the loss where they are.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {self.dtype}; give torch.float16 or torch.bfloat16")

    def reduction(self, bucket: Bucket, exchange: GradientComm, number: int) -> Reduction:
        """An all-reduce of a rounded copy."""
        return _Rounded(bucket, exchange, self.dtype)

    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int, more: int = 0) -> int:
        """2 (n - 1) / n of 2 bytes an element."""
        return all_reduce_bytes(2 * (elements_of(tensors) + more), ranks)


class _InPlace(Reduction):
    def __init__(self, bucket: Bucket, exchange: GradientComm) -> None:
        self._flat, self._exchange = bucket.flat, exchange

    def run(self) -> Iterator[PendingMessage]:
        yield self._exchange.all_reduce(self._flat)


class _Rounded(Reduction):
    def __init__(self, bucket: Bucket, exchange: GradientComm, dtype: torch.dtype) -> None:
        self._flat, self._exchange = bucket.flat, exchange
        self._wire = exchange.zeros(bucket.elements, dtype, bucket.flat.device)

    def run(self) -> Iterator[PendingMessage]:
        self._wire.copy_(self._flat)
        yield self._exchange.all_reduce(self._wire)
        self._flat.copy_(self._wire)


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-reduce of `size` bytes: 2 (n - 1) / n of them."""
    return 2 * (ranks - 1) * size // ranks


def elements_of(tensors: Sequence[Tensor]) -> int:
    """How many numbers the tensors hold together."""
    return sum(tensor.numel() for tensor in tensors)


def compression_of(given: str | Compression | None) -> Compression:
    """The object for a name; None is none.

    Raises:
        TypeError, ValueError: it is neither a name nor an object, or an unknown name.
    """
    from minidist.parallel.compression.power_sgd import PowerSGD
    from minidist.parallel.compression.top_k import TopK

    named = {
        "float16": Cast(torch.float16),
        "bfloat16": Cast(torch.bfloat16),
        "topk": TopK(),
        "powersgd": PowerSGD(),
    }
    if given is None:
        return NoCompression()
    if isinstance(given, Compression):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"compression is {given!r}; give one of {', '.join(named)}, an object such as TopK(0.01), or None"
        )
    if given not in named:
        raise unknown("compression", given, named)
    return named[given]
