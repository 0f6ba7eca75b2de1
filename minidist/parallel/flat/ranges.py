"""Which elements of a flat tensor are whose: the parameters in it, its shares, and boxes of each parameter.

A share of a flat tensor begins and ends wherever the division falls, even in the middle of a row. A
checkpoint needs boxes, because other layouts can cut them anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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


OffsetsAndSizes = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the sizes of a box, one of each for every dimension."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[OffsetsAndSizes]:
    """Cut the elements from `start` to `stop` of a row-major tensor into boxes, in the order of the elements.

    Yields:
        At most 2 d - 1 boxes for d dimensions. The elements of a box are neighbours in the flat tensor.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows that are whole
    if first > last:  # a part of one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[OffsetsAndSizes]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def narrowed(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
