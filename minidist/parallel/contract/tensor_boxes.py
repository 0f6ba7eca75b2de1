"""Boxes of tensors: in which a rank tells its part of the training state, and checkpoints save and load it.

A rank may hold any part of a tensor. It tells that part as boxes, so that another layout, which cuts tensors
at other places, can read what it needs of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist.parallel.flat.ranges import boxes


class TensorBox(NamedTuple):
    """A box of a tensor of the training state, as this rank holds it.

    Checkpoints save such boxes and load them into other ones, so a box says where it lies in the whole
    tensor.
    """

    name: str  # "model.layers.0.weight", "optimizer.layers.0.weight.exp_avg"
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where this box begins in it
    tensor: Tensor  # its values, a view of the state: writing to it changes the state


def whole_box(name: str, tensor: Tensor) -> TensorBox:
    """The box of a tensor that this rank has whole."""
    return TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def optimizer_boxes(name: str, state: Mapping[str, Any]) -> Iterator[TensorBox]:
    """The tensors in a parameter's state; one in a list, as LBFGS keeps, has its index in the key."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield whole_box(f"optimizer.{name}.{key}", value)
        for i, each in enumerate(value if isinstance(value, list) else ()):
            if isinstance(each, Tensor):
                yield whole_box(f"optimizer.{name}.{key}[{i}]", each)


def cut_chunks(name: str, shape: tuple[int, ...], start: int, values: Tensor) -> Iterator[TensorBox]:
    """The boxes of a tensor that together hold its elements from `start` on, whose values are `values`."""
    flat, done = values.reshape(-1), 0
    for offsets, sizes in boxes(shape, start, start + len(flat)):
        count = torch.Size(sizes).numel()
        yield TensorBox(name, shape, offsets, flat[done : done + count].view(sizes))
        done += count


def common_part(
    offsets: Sequence[int], sizes: Sequence[int], of_other: Sequence[int], sizes_of_other: Sequence[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """The common part of two boxes of a tensor: where it begins in each, and its sizes; None for none."""
    first = [*map(max, offsets, of_other)]
    ends = (min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, of_other, sizes_of_other, strict=True))
    common = [end - start for start, end in zip(first, ends, strict=True)]
    if min(common, default=1) <= 0:
        return None
    here, there = ([f - o for f, o in zip(first, each, strict=True)] for each in (offsets, of_other))
    return here, there, common
