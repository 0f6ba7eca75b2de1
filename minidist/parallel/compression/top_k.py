"""Top-k: send the largest gradients with their indices, and add the others to the next step's.

Few elements carry most of a gradient. What is left out is not lost: each rank adds it to its next gradient
(error feedback), where it grows until it is sent. With error feedback SGD converges at the rate of plain SGD;
without it, it need not converge at all.

Sources: Stich et al. 2018, "Sparsified SGD with Memory", algorithm 1; Lin et al. 2018, "Deep Gradient
Compression", section 3.1, without its momentum correction and clipping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.parallel.compression.compressor import Compression, Reduction, Views, elements_of
from minidist.parallel.flat.gradients import GradientComm, PendingMessage

INDEX = torch.int32
"""The dtype of an element's index in its bucket."""
SAMPLE = 20_000
"""About how many elements are sampled to estimate how large the largest are."""


@dataclass(frozen=True)
class TopK(Compression):
    """Sends `ratio` of each bucket's elements, those of largest magnitude, with an all-gather.

    Each rank sends (n - 1) k (4 + s) bytes for k elements of s bytes; an all-reduce of all N sends 2 (n - 1)
    / n N s. So with many ranks the ratio has to be small. Memory: one more copy of the gradients.
    """

    reads_values = True
    ratio: float = 0.01  # of the elements; at least one element of each bucket is sent
    error_feedback: bool = True  # False drops what is not sent, for comparison

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}; give a share of the elements, above 0 and up to 1")

    def reduction(self, flat: Tensor, views: Views, over: GradientComm, number: int) -> Reduction:
        """An all-gather of the chosen elements and their indices."""
        return _TopKReduction(flat, over, self)

    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int) -> int:
        """(n - 1) k (4 + s)."""
        return (ranks - 1) * self.chosen(elements_of(tensors)) * (INDEX.itemsize + tensors[0].element_size())

    def chosen(self, elements: int) -> int:
        """Return how many of a bucket's elements are sent."""
        return min(elements, max(1, round(self.ratio * elements)))


class _TopKReduction(Reduction):
    def __init__(self, flat: Tensor, gradient_comm: GradientComm, options: TopK) -> None:
        self._flat, self._gradient_comm = flat, gradient_comm
        self.error = torch.zeros_like(flat) if options.error_feedback else None
        self._count = options.chosen(len(flat))
        self._value_bytes = self._count * flat.element_size()

    def run(self) -> Iterator[PendingMessage]:
        flat = self._flat
        if self.error is not None:
            flat += self.error
        indices = largest(flat.abs(), self._count)
        values = flat[indices]
        if self.error is not None:
            self.error.copy_(flat)
            self.error[indices] = 0

        # One message holds values and indices, so its latency is paid once.
        work = self._gradient_comm.all_gather(torch.cat([_bytes(values), _bytes(indices.to(INDEX))]))
        yield work

        flat.zero_()
        # In rank order, so that the sum is the same on all ranks.
        for chosen in work.wait().view(self._gradient_comm.ranks, -1):
            theirs = chosen[: self._value_bytes].clone().view(flat.dtype)
            flat.index_add_(0, chosen[self._value_bytes :].clone().view(INDEX), theirs)


def largest(magnitudes: Tensor, count: int) -> Tensor:  # (N,), k -> (k,)
    """Return the indices of the `count` largest elements.

    Selecting a few of millions is slow. So a sample gives a threshold that about twice as many elements
    exceed, as in Lin et al. 2018, section 5. If at least `count` elements do, the largest are among them;
    otherwise all elements are searched.
    """
    elements = len(magnitudes)
    sample = magnitudes[:: max(1, elements // SAMPLE)]
    expected = 2 * count * len(sample) // elements if elements else 0
    if 0 < expected < len(sample) // 4:
        floor = sample.topk(expected, sorted=False).values.min()
        candidates = (~(magnitudes < floor)).nonzero()[:, 0]  # includes NaN, as topk does
        if len(candidates) >= count:
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
