"""The sampler: the same global batches for any number of ranks, every row once an epoch, any step at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.model.sampler import Sampler
from tests.helpers.refusals import refuses


@st.composite
def cases(draw):
    """(rows, global_batch, ranks, seed, drop_last) that a sampler takes."""
    rows = draw(st.integers(1, 60))
    global_batch = draw(st.integers(1, 70))
    drop_last = draw(st.booleans()) and rows >= global_batch
    last = rows % global_batch
    smallest = global_batch if drop_last or last == 0 else last
    ranks = draw(st.integers(1, smallest))
    return rows, global_batch, ranks, draw(st.integers(0, 5)), drop_last


@settings(deadline=None)
@given(cases(), st.integers(0, 12))
def test_shares_in_rank_order_are_the_global_batch(case, step):
    rows, global_batch, ranks, seed, drop_last = case
    alone = Sampler(rows, global_batch, seed=seed, drop_last=drop_last)
    deal = [
        Sampler(rows, global_batch, rank=rank, ranks=ranks, seed=seed, drop_last=drop_last)
        for rank in range(ranks)
    ]
    batch = alone.batch(step)
    shares = [sampler.share(step) for sampler in deal]
    assert torch.cat(shares).tolist() == batch.tolist() == alone.share(step).tolist()
    assert all(sampler.batch(step).tolist() == batch.tolist() for sampler in deal)
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(cases(), st.integers(0, 3))
def test_an_epoch_visits_each_row_once(case, epoch):
    rows, global_batch, _, seed, drop_last = case
    sampler = Sampler(rows, global_batch, seed=seed, drop_last=drop_last)
    batches = list(sampler.epoch(epoch))
    assert len(batches) == len(sampler) == sampler.steps_per_epoch
    visited = torch.cat(batches).tolist()
    assert len(set(visited)) == len(visited) == (rows - rows % global_batch if drop_last else rows)
    assert set(visited) <= set(range(rows))
    full = batches if drop_last else batches[:-1]
    assert all(len(batch) == global_batch for batch in full)


def test_order_depends_on_seed_and_epoch_alone_and_leaves_the_global_state():
    before = torch.random.get_rng_state()
    sampler = Sampler(100, 10, seed=3)
    first = sampler.batch(0)
    # Out of order, back again, and in a fresh sampler at once: as a run that resumes asks for them.
    later = sampler.batch(25)
    assert torch.equal(sampler.batch(0), first)
    assert torch.equal(Sampler(100, 10, seed=3).batch(25), later)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(Sampler(100, 10, seed=4).batch(0), first)
    epochs = [torch.cat(list(sampler.epoch(number))).tolist() for number in range(3)]
    assert len({tuple(order) for order in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])


test_what_leaves_a_rank_without_rows_is_refused = refuses(
    Sampler,
    (
        {"rows": 100, "global_batch": 4, "ranks": 8},
        r"8 ranks are more than a global batch has rows \(4\); give",
    ),
    ({"rows": 1437, "global_batch": 718, "ranks": 2}, r"an epoch has rows \(1: 1437 rows are 2 global"),
    ({"rows": 3, "global_batch": 8, "ranks": 4}, r"4 ranks .* last batch of an epoch has rows \(3"),
    ({"rows": 7, "global_batch": 8, "drop_last": True}, "drop_last leaves no batch"),
    ({"rows": 0, "global_batch": 8}, "rows is 0; give at least 1"),
    ({"rows": 8, "global_batch": 0}, "global_batch is 0"),
    ({"rows": 8, "global_batch": 8, "ranks": 0}, "ranks is 0"),
    (
        {"rows": 8, "global_batch": 8, "ranks": 2, "rank": 2},
        "rank is 2 with 2 ranks; give a rank from 0 to 1",
    ),
    ({"rows": 8, "global_batch": 8, "ranks": 2, "rank": -1}, "rank is -1"),
)


def test_steps_and_sizes_are_whole_numbers_from_zero():
    with pytest.raises(ValueError, match="step is -1; steps count from 0"):
        Sampler(8, 4).batch(-1)
    with pytest.raises(TypeError, match=r"rows is 8\.0 \(float\); give an integer"):
        Sampler(8.0, 4)
