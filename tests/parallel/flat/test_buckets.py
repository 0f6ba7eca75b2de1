"""Buckets: how tensors are dealt to them, and what is agreed on before they are filled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minidist as md
from minidist import comm
from minidist.parallel.flat.joined_messages import broadcast_together, deal_to_buckets
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import error_of

DTYPES = (torch.float32, torch.float64, torch.float16)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=12),
    st.integers(0, 100),
    st.randoms(),
)
def test_every_tensor_is_in_one_bucket_of_its_dtype(
    shapes: list[tuple[int, torch.dtype]], limit: int, random: object
) -> None:
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in shapes]
    order = [*range(len(tensors))]
    random.shuffle(order)  # type: ignore[attr-defined]
    parts = deal_to_buckets(tensors, order, limit)
    assert sorted(place for places in parts for place in places) == sorted(order)
    came = {place: when for when, place in enumerate(order)}
    complete = [max(came[place] for place in places) for places in parts]
    assert complete == sorted(complete), "buckets are complete in the order in which they are sent"
    for places in parts:
        assert len({tensors[place].dtype for place in places}) == 1
        assert [came[place] for place in places] == sorted(came[place] for place in places)
        size = sum(tensors[place].nbytes for place in places)
        assert len(places) == 1 or (limit and size <= limit)


def test_small_tensors_share_a_bucket_and_a_large_one_has_its_own() -> None:
    tensors = [torch.empty(size) for size in (2, 2, 9, 1, 3, 3)]
    assert deal_to_buckets(tensors, range(6), limit=16) == [[0, 1], [2], [3, 4], [5]]
    assert deal_to_buckets(tensors, reversed(range(6)), limit=10**6) == [[5, 4, 3, 2, 1, 0]]
    assert deal_to_buckets(tensors, range(6), limit=0) == [[i] for i in range(6)]
    assert deal_to_buckets([], [], limit=5) == []


@on_ranks(3)
def test_rank_0s_tensors_reach_all_in_few_messages() -> None:
    tensors = [
        torch.full((3,), float(md.rank())),
        torch.full((2, 2), float(md.rank()), dtype=torch.float64).t(),
        torch.tensor(md.rank() == 0),
        torch.full((4, 2), float(md.rank()))[:, 1],  # not contiguous
        torch.empty(0),
    ]
    with comm.ledger() as ledger:
        broadcast_together(tensors, None)
    values = [tensor.double().flatten().tolist() for tensor in tensors]
    assert values == [[0] * 3, [0] * 4, [1], [0] * 4, []]
    assert len(ledger.calls) == 3, "one for each dtype"


DIFFERENCES = {
    "shape": "0.weight (4, 2) torch.float32 True",
    "dtype": "0.weight (3, 2) torch.float64 True",
    "name": "1.weight (3, 2) torch.float32 True",
    "requires_grad": "0.weight (3, 2) torch.float32 False",
    "more": "no more",
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_with_other_modules_are_named(cluster_of: Clusters, difference: str) -> None:
    def build() -> None:
        module = nn.Sequential(nn.Linear(2, 3))
        if md.rank() == 1:
            if difference == "shape":
                module = nn.Sequential(nn.Linear(2, 4))
            elif difference == "dtype":
                module.double()
            elif difference == "name":
                module = nn.Sequential(nn.Identity(), nn.Linear(2, 3))
            elif difference == "more":
                module = nn.Sequential(nn.Linear(2, 3, bias=False))
            else:
                module.requires_grad_(False)
        md.DataParallel(module)

    for text in cluster_of(3).run(error_of, ValueError, build):
        assert text.startswith("the parameters and buffers of rank 1 in the group differ from rank 0's in")
        assert f", and rank 1 {DIFFERENCES[difference]}; build the same module on all ranks" in text
