"""Experts placed on ranks: the fullest rank's load, and no expert twice on a rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.parallel.experts.replica_advice import place_experts


def fullest(load: list[float], placed: list[list[int]]) -> float:
    """The fullest rank's load over the mean; replicas share an expert's load evenly."""
    replicas = [sum(expert in each for each in placed) for expert in range(len(load))]
    return max(sum(load[e] / replicas[e] for e in each) for each in placed) * len(placed) / sum(load)


def test_a_zipf_load_is_even() -> None:
    load = [1 / (expert + 1) for expert in range(256)]
    assert fullest(load, place_experts(load, 32)) < 1.02
    assert fullest(load, place_experts(load, 32, slots=8)) > 5  # without a replica the first expert is alone


@given(
    st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.0, 7.0, 50.0]), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_every_expert_is_somewhere_and_nowhere_twice(load: list[float], ranks: int, more: int) -> None:
    slots = -(-len(load) // ranks) + more
    placed = place_experts(load, ranks, slots)
    assert len(placed) == ranks
    assert {expert for each in placed for expert in each} == {*range(len(load))}
    assert all(len({*each}) == len(each) <= slots for each in placed)


def test_too_little_room_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks with 1 slots each cannot hold 3 experts"):
        place_experts([1, 1, 1], 2, 1)
    with pytest.raises(ValueError, match="load of an expert is -1"):
        place_experts([1, -1], 2)
