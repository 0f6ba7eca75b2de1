"""What needs no ranks: values as JSON, boxes, names in a folder, random states."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.checkpoint import folders, index, state, values
from minidist.checkpoint.index import check_boxes
from minidist.parallel.flat.ranges import boxes
from tests.helpers.refusals import refuses

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN,
    lambda each: (
        st.lists(each)
        | st.lists(each).map(tuple)
        | st.dictionaries(st.text(), each)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), each)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(NESTED)
def test_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    again = values.decode(json.loads(json.dumps(values.encode(value, "it"))))
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.1),
        torch.tensor([[1, 2], [3, 4]]),
        torch.zeros(0, 3),
        torch.tensor([True]),
        torch.tensor([0.1, math.inf], dtype=torch.bfloat16),
    ],
)
def test_small_tensors_come_back(tensor: torch.Tensor) -> None:
    again = values.decode(json.loads(json.dumps(values.encode({"lr": tensor}, "it"))))["lr"]
    assert torch.equal(again, tensor)
    assert again.dtype == tensor.dtype


@pytest.mark.parametrize("value", [object(), {"a": [1, print]}, {1: object()}, b"bytes", {1, 2}])
def test_what_json_cannot_hold_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="which a checkpoint cannot hold; give"):
        values.encode(value, "extra")


@pytest.mark.parametrize(
    "value", [{"$call": ["os.system", "true"]}, {"$tensor": ["load", [1], [1]]}, {"$tensor": 1}]
)
def test_what_was_never_written_is_not_read(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        values.decode(value)


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.data())
def test_cuts_of_a_flat_tensor_are_its_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    ranges = zip([0, *cuts], [*cuts, size], strict=True)
    parts = [box for start, stop in ranges for box in boxes(shape, start, stop)]
    check_boxes("it", shape, parts)
    if parts:
        with pytest.raises(ValueError, match="elements"):
            check_boxes("it", shape, parts[:-1])
        with pytest.raises(ValueError, match="elements"):
            check_boxes("it", shape, [*parts, parts[0]])


test_boxes_that_do_not_make_up_a_tensor = refuses(
    lambda parts: check_boxes("it", (2, 3), parts),
    ([((0, 0), (2, 2)), ((1, 1), (1, 2))], "overlap"),
    ([((0, 0), (1, 3)), ((0, 0), (1, 3))], "overlap"),
    ([((0, 0), (3, 2))], "outside"),
    ([((-1, 0), (2, 3))], "outside"),
    ([((0,), (6,))], "dimensions"),
    ([], "hold 0 elements"),
)


def test_random_states_come_back() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), float(numpy.random.randn()), float(torch.rand(()))  # noqa: NPY002

    draw()  # gauss and randn keep half of what they drew
    saved = state.random_state()
    expected = [draw() for _ in range(3)]
    state.set_random_state(saved)
    assert [draw() for _ in range(3)] == expected


def test_checkpoints_are_in_the_order_of_their_saves(tmp_path: Path) -> None:
    for step, number in ((50, 1), (100, 2), (60, 4), (70, 3), (80, 3)):
        path = tmp_path / folders.step_name(step)
        path.mkdir()
        index.write_index(path, {}, {}, {}, number)
    for step in (200, 90, 40):  # whose index is lost
        (tmp_path / folders.step_name(step)).mkdir()
    found = [int(path.name.removeprefix("step-")) for path in folders.checkpoints(tmp_path)]
    assert found == [200, 90, 60, 80, 70, 100, 50, 40]
    assert folders.next_number(tmp_path) == 5
    assert folders.next_number(tmp_path / "none") == 1


def test_new_directories_reach_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(folders, "sync_directory", synced.append)
    for _ in range(2):
        folders.make_directory(tmp_path / "a" / "b")
        assert sorted(synced) == [tmp_path, tmp_path / "a"]


def test_checkpoints_of_no_index_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    names = ["step-00000009", "step-00000100", "step-123456789", "step-00000007.writing", "step-7", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in folders.checkpoints(tmp_path)] == [names[2], names[1], names[0]]
    assert folders.checkpoints(tmp_path / "none") == []
    assert folders.step_name(123456789) == "step-123456789"
