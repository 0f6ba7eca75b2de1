"""Ranges of flat tensors as boxes: every element once, in order."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.parallel.flat.ranges import boxes


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_elements_in_order(sizes: list[int], data: st.DataObject) -> None:
    shape, count = tuple(sizes), math.prod(sizes)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = torch.arange(count).view(shape)
    found = []
    parts = [*boxes(shape, start, stop)]
    for offsets, extent in parts:
        box = whole[tuple(slice(o, o + size) for o, size in zip(offsets, extent, strict=True))]
        assert box.shape == extent
        found += box.flatten().tolist()
    assert found == [*range(start, stop)]
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_no_elements_are_no_boxes() -> None:
    assert [*boxes((0, 3), 0, 0)] == []
    assert [*boxes((2, 0), 0, 0)] == []
