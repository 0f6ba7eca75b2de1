"""Where parameters lie in a bucket's flat tensors, and which part of a flat tensor each rank owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # a browser counts with these functions, and has no torch
    from torch import Tensor


@dataclass(frozen=True)
class ParameterRange:
    """Elements `start` to `stop` of the parameter at `param_index`."""

    param_index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Deal: TypeAlias = "Callable[[Sequence[Tensor], int], tuple[list[int], int]]"
"""From the tensors of a bucket and the number of shares to where each tensor begins, and a share's length."""


def evenly(tensors: Sequence[Tensor], ranks: int) -> tuple[list[int], int]:
    """Tensors one after the other: shares are equal, and may end inside a tensor."""
    sizes = [tensor.numel() for tensor in tensors]
    return [0, *accumulate(sizes)][: len(sizes)], -(-sum(sizes) // ranks)


def longest_first(sizes: Sequence[float], bins: list[float]) -> list[int]:
    """Deal tensors, the largest first, each to the emptiest of the bins, which fill; returns each one's."""
    chosen, emptiest = [0] * len(sizes), [(filled, number) for number, filled in enumerate(bins)]
    heapify(emptiest)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        filled, chosen[i] = emptiest[0]
        bins[chosen[i]] = filled + sizes[i]
        heapreplace(emptiest, (bins[chosen[i]], chosen[i]))
    return chosen


def matrix_work(shape: tuple[int, ...]) -> float:
    """The work of a Newton-Schulz iteration (training/muon.py) on a matrix, or on each of a stack.

    Two products of (m, m) and (m, n) or their like, and one of (m, m) and (m, m); m <= n.
    """
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * m * m * (2.0 * n + m)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a parameter before tensor parallelism cut it."""
    return tuple(getattr(tensor, "tp_cut", tensor).shape)


class WholeTensors:
    """Deals whole tensors to shares, as for an optimizer that looks at whole parameters.

    Shares of a bucket are to have about as many elements, as the fullest one pads the others. Over all
    buckets, owners are to have as much work: the share with the most goes to whoever has the least so far.
    Ranks that hold parts of the same tensors choose the same owners, since whole shapes decide.

    work: from a whole shape to the relative time of the tensor's update. loads: of each owner.
    """

    def __init__(self, work: Callable[[tuple[int, ...]], float], ranks: int) -> None:
        self.work, self.loads = work, [0.0] * ranks

    def __call__(self, tensors: Sequence[Tensor], ranks: int) -> tuple[list[int], int]:
        """Where each tensor begins, and the length of a share: see `Deal`."""
        shapes = [whole_shape(tensor) for tensor in tensors]
        bins = longest_first([math.prod(shape) for shape in shapes], [0.0] * ranks)
        work = [0.0] * ranks
        for shape, each in zip(shapes, bins, strict=True):
            work[each] += self.work(shape)
        idle_first = sorted(range(ranks), key=self.loads.__getitem__)
        owner_of = dict(zip(sorted(range(ranks), key=lambda each: -work[each]), idle_first, strict=True))
        for each, owner in owner_of.items():
            self.loads[owner] += work[each]
        filled, at = [0] * ranks, []
        for tensor, each in zip(tensors, bins, strict=True):
            at.append(filled[each])
            filled[each] += tensor.numel()
        share = max(filled)
        return [owner_of[each] * share + start for each, start in zip(bins, at, strict=True)], share


class BucketLayout:
    """Parameters one after the other in a flat tensor, padded and cut into shares of equal length.

    param_indices: of the parameters, in their order in the bucket. tensors: all of them, by index. owners:
    how many ranks own a share each; rank: which of them this one is. copies: how many ranks own the same
    share. deal: decides where the parameters lie.

    Attributes:
        cuts_anywhere: whether a share may end inside a parameter.
        shapes, spans: of the parameters; the elements of each in the flat tensor.
        elements, length: of all parameters; of the flat tensor, with its padding.
        share, own_range: the elements of a share; those of this rank's.
    """

    def __init__(
        self,
        param_indices: Sequence[int],
        tensors: Sequence[Tensor],
        owners: int = 1,
        rank: int = 0,
        copies: int = 1,
        deal: Deal = evenly,
    ) -> None:
        self.owners, self.rank, self.copies = owners, rank, copies
        self.param_indices, self.dtype = [*param_indices], tensors[param_indices[0]].dtype
        self.shapes = [tuple(tensors[index].shape) for index in param_indices]
        sizes = [math.prod(shape) for shape in self.shapes]
        self.cuts_anywhere = deal is evenly
        starts, self.share = deal([tensors[index] for index in param_indices], owners)
        self.spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self.elements, self.length = sum(sizes), owners * self.share
        self.own_range = slice(rank * self.share, (rank + 1) * self.share)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor in the parameters' shapes."""
        pairs = zip(self.spans, self.shapes, strict=True)
        return [flat[start:stop].view(shape) for (start, stop), shape in pairs]

    def gaps_of(self, flat: Tensor) -> list[Tensor]:
        """The padding of a flat tensor, between and behind the parameters."""
        spans = [(0, 0), *sorted(self.spans), (self.length, self.length)]
        gaps = [(stop, start) for (_, stop), (start, _) in pairwise(spans)]
        return [flat[start:stop] for start, stop in gaps if start < stop]

    def ranges(self) -> Iterator[tuple[int, ParameterRange]]:
        """The parts of parameters in this rank's share: where in the share each begins, in order."""
        low, high = self.own_range.start, self.own_range.stop
        for (start, stop), index in sorted(zip(self.spans, self.param_indices, strict=True)):
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                yield begin - low, ParameterRange(index, begin - start, end - start)

    def gather_bytes(self) -> int:
        """Bytes that a rank sends to publish its share of the values."""
        return (self.owners - 1) * self.share * self.dtype.itemsize

    def reduce_bytes(self) -> int:
        """Bytes that a rank sends to reduce the gradients to their owners."""
        return self.gather_bytes() + 2 * (self.copies - 1) * self.share * self.dtype.itemsize // self.copies
