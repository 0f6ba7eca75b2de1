"""Top-k: send the largest gradients and their places, and add the others to the next step's.

Few elements carry most of a gradient. What is left out is not lost: each rank adds it to its next gradient
(error feedback), where it grows until it is sent. With the memory of it SGD converges at the rate of plain
SGD; without it, it need not converge at all.

Sources: Stich et al. 2018, "Sparsified SGD with Memory", algorithm 1; Lin et al. 2018, "Deep Gradient
Compression", section 3.1, of which the momentum correction and the clipping are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.parallel.compression.compressor import Compression, Reduction, elements_of
from minidist.parallel.flat.buckets import Bucket, GradientComm, PendingMessage

PLACE = torch.int32
"""Of an element's place in its bucket."""
SAMPLE = 20_000
"""Elements, about, from which it is guessed how large the largest of all are."""


@dataclass(frozen=True)
class TopK(Compression):
    """Send `ratio` of each bucket's elements, those of largest magnitude, by an all-gather.

    Each rank sends (n - 1) k (4 + s) bytes for k elements of s bytes, where an all-reduce of all N sends
    2 (n - 1) / n N s: with many ranks the ratio has to be small. Memory: one more copy of the gradients.
    """

    ratio: float = 0.01  # of the elements; at least one of a bucket is sent
    error_feedback: bool = True  # False drops what is not sent: for comparison

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}; give a share of the elements, above 0 and up to 1")

    def reduction(self, bucket: Bucket, exchange: GradientComm, number: int) -> Reduction:
        """An all-gather of the chosen elements and their places."""
        return _TopKReduction(bucket, exchange, self)

    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int, more: int = 0) -> int:
        """(n - 1) k (4 + s)."""
        return (ranks - 1) * self.chosen(elements_of(tensors)) * (PLACE.itemsize + tensors[0].element_size())

    def chosen(self, elements: int) -> int:
        """How many elements of a bucket are sent."""
        return min(elements, max(1, round(self.ratio * elements)))


class _TopKReduction(Reduction):
    def __init__(self, bucket: Bucket, exchange: GradientComm, options: TopK) -> None:
        self._flat, self._exchange = bucket.flat, exchange
        self._error = torch.zeros_like(bucket.flat) if options.error_feedback else None
        self._count = options.chosen(bucket.elements)
        self._value_bytes = self._count * bucket.flat.element_size()

    def run(self) -> Iterator[PendingMessage]:
        flat = self._flat
        if self._error is not None:
            flat += self._error
        places = largest(flat.abs(), self._count)
        values = flat[places]
        if self._error is not None:
            self._error.copy_(flat)
            self._error[places] = 0

        # One message holds both: its latency is paid once.
        work = self._exchange.all_gather(torch.cat([_bytes(values), _bytes(places.to(PLACE))]))
        yield work

        flat.zero_()
        for chosen in work.wait().view(self._exchange.ranks, -1):  # in rank order: the same sum on all
            theirs = chosen[: self._value_bytes].clone().view(flat.dtype)
            flat.index_add_(0, chosen[self._value_bytes :].clone().view(PLACE), theirs)

    def rescale(self, factor: float) -> None:
        if self._error is not None:
            self._error.mul_(factor)

    def forget(self) -> None:
        if self._error is not None:
            self._error.zero_()


def largest(magnitudes: Tensor, count: int) -> Tensor:  # (N,), k -> (k,)
    """The places of the `count` largest.

    Sorting out a few of millions is slow. So a sample says what about twice as many exceed, and the largest
    are looked for among those, as in Lin et al. 2018, section 5; they are the largest of all if they are
    enough.
    """
    elements = len(magnitudes)
    sample = magnitudes[:: max(1, elements // SAMPLE)]
    expected = 2 * count * len(sample) // elements if elements else 0
    if 0 < expected < len(sample) // 4:
        floor = sample.topk(expected, sorted=False).values.min()
        candidates = (~(magnitudes < floor)).nonzero()[:, 0]  # NaN too, as topk has it
        if len(candidates) >= count:
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
