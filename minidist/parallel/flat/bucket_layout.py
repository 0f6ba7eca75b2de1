"""Where parameters lie in a bucket's flat tensors, and which part of a flat tensor each rank owns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True)
class ParameterRange:
    """Elements `start` to `stop` of the parameter at `param_index`."""

    param_index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def evenly(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """Where each tensor of `sizes` elements begins, one after the other; and the length of a share."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return starts, -(-sum(sizes) // ranks)


def whole(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """The same where no tensor may be cut, as for an optimizer that looks at whole parameters.

    Each tensor, the largest first, goes to the share that is emptiest, which pads more.
    """
    filled, owners, offsets = [0] * ranks, [0] * len(sizes), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(ranks), key=filled.__getitem__)
        offsets[i] = filled[owners[i]]
        filled[owners[i]] += sizes[i]
    share = max(filled, default=0)
    return [owner * share + offset for owner, offset in zip(owners, offsets, strict=True)], share


class BucketLayout:
    """Parameters one after the other in a flat tensor, padded and cut into shares of equal length.

    param_indices: of the parameters, in their order in the bucket. tensors: all of them, by index. owners:
    how many ranks own a share each, and which of them this one is. copies: how many ranks own the same share.
    cut_anywhere: whether a share may end inside a parameter.

    Attributes:
        shapes, spans: of the parameters; the elements of each in the flat tensor.
        elements, length: of all parameters; of the flat tensor, with its padding.
        share, own: the elements of a share; those of this rank's.
    """

    def __init__(
        self,
        param_indices: Sequence[int],
        tensors: Sequence[Tensor],
        owners: tuple[int, int] = (1, 0),
        copies: int = 1,
        cut_anywhere: bool = True,
    ) -> None:
        (self.ranks, rank), self.copies = owners, copies
        self.param_indices, self.dtype = [*param_indices], tensors[param_indices[0]].dtype
        self.shapes = [tuple(tensors[index].shape) for index in param_indices]
        sizes = [math.prod(shape) for shape in self.shapes]
        starts, self.share = (evenly if cut_anywhere else whole)(sizes, self.ranks)
        self.spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self.elements, self.length = sum(sizes), self.ranks * self.share
        self.own = slice(rank * self.share, (rank + 1) * self.share)

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
        low, high = self.own.start, self.own.stop
        for (start, stop), index in sorted(zip(self.spans, self.param_indices, strict=True)):
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                yield begin - low, ParameterRange(index, begin - start, end - start)

    def gather_bytes(self) -> int:
        """Bytes that a rank sends to publish its share of the values."""
        return (self.ranks - 1) * self.share * self.dtype.itemsize

    def reduce_bytes(self) -> int:
        """Bytes that a rank sends to reduce the gradients to their owners."""
        return self.gather_bytes() + 2 * (self.copies - 1) * self.share * self.dtype.itemsize // self.copies
