"""Parts of flat tensors as boxes of the tensors that lie in them.

A shard of a flat buffer begins and ends wherever the division falls, in the middle of a row too; what a
checkpoint can cut anew are boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements from `start` to `stop` of a row-major tensor into boxes, in the order of the elements.

    Returns:
        Offsets and sizes of each; at most 2 d - 1 of them for d dimensions. The elements of a box follow each
        other in the flat tensor, too.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows that are whole
    if first > last:  # a part of one row
        row = last
        yield from _in_row(shape, row, start - row * inner, stop - row * inner)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def narrowed(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
