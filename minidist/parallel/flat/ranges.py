"""Ranges of a flat tensor as boxes of the tensors that lie in it.

A share of a flat tensor begins and ends wherever the division falls, even in the middle of a row. A
checkpoint needs boxes, because other layouts can cut them anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

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
