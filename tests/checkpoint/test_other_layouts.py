"""Checkpoints across layouts: saved with matrices, layers or tokens cut, and loaded without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist.checkpoint import state_dict
from minidist.model import GPT, config
from tests.checkpoint.test_checkpoint import PARSE, STOP, check_other_layout, check_same_layout, train_part
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.contract import ADAMW
from tests.parallel.test_layouts import case

CASE = replace(case(2, 8), batches=(9, 8, 7), optimizer=ADAMW)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp=2,pp=2,micro_batches=2", "dp=4,zero=2"),
        ("dp=2,tp=2,zero=1", "pp=2,micro_batches=2"),
        ("dp=2,pp=2,zero=1", "tp=2,sequence_parallel=true"),
        ("tp=2,cp=2,zero=3", "dp=2,pp=2,zero=1"),
        ("dp=4,zero=1,shard=2", "dp=3,zero=3"),
        ("dp=2,cp=2,zero=3,shard=2", "dp=4,zero=2,shard=2"),
        *(
            pytest.param(*each, marks=[pytest.mark.deep])
            for each in (
                ("dp=4,zero=2", "tp=2,pp=2,micro_batches=2"),
                ("dp=2,tp=2,zero=2", "dp=4,zero=3,shard=2"),
                ("dp=1", "dp=6,zero=2,shard=3"),
                ("dp=6,zero=3,shard=2", "dp=1"),
                ("dp=2,pp=2,zero=1", "dp=4,pp=2,zero=1,shard=2,micro_batches=2"),
            )
        ),
    ],
)
def test_another_layout_goes_on(cluster_of: Clusters, tmp_path: Path, before: str, after: str) -> None:
    check_other_layout(cluster_of, tmp_path, CASE, PARSE(before), PARSE(after))


HALVED = replace(CASE, model=lambda seed: CASE.model(seed).float())
SAME = [(CASE, text) for text in ("dp=2,tp=2,zero=1", "dp=2,pp=2", "tp=2,cp=2,zero=3", "dp=4,zero=1,shard=2")]
SAME += [(HALVED, f"dp=4,zero={zero},shard=2,precision=bf16") for zero in (1, 2, 3)]


@pytest.mark.parametrize(("of", "layout"), SAME)
def test_the_same_layout_goes_on_bit_for_bit(
    cluster_of: Clusters, tmp_path: Path, of: contract.Case, layout: str
) -> None:
    check_same_layout(cluster_of, tmp_path, of, PARSE(layout))


def test_a_load_renews_secondary_shares(cluster_of: Clusters, tmp_path: Path) -> None:
    def train(more: int) -> contract.Trained:
        """Save after a step, take some more, go back, and take the second step."""
        engine = md.prepare(CASE.model(0), CASE.optimizer, md.Layout(4, zero=3), fully_shard={"secondary": 2})
        (inputs, targets), *_ = CASE.global_batches()
        own = slice(engine.data_rank, None, engine.data_ranks)
        engine.step(inputs[own], targets[own])
        md.save(engine, tmp_path / str(more))
        for _ in range(more):
            engine.step(inputs[own], targets[own])
        engine.evaluate(inputs[own], targets[own])  # gathers, so that the shares are those of now
        md.load(engine, tmp_path / str(more))
        return contract.Trained([engine.step(inputs[own], targets[own])], engine.full_state_dict())

    for found, expected in zip(cluster_of(4).run(train, 2), cluster_of(4).run(train, 0), strict=True):
        contract.compare(found, expected)


def test_a_checkpoint_looks_as_if_one_process_had_saved_it(cluster_of: Clusters, tmp_path: Path) -> None:
    found = []
    for text in ("dp=1", "tp=2,pp=2", "dp=2,pp=2,zero=1"):
        path, layout = tmp_path / text / f"step-{STOP:08d}", PARSE(text)
        cluster_of(layout.ranks).run(train_part, CASE, layout, path, False, STOP)
        found.append(state_dict(path))
    whole, *others = found
    for other in others:
        assert [*other] == [*whole]
        for name, value in whole.items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["dp=2,pp=2,zero=1", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3"])
def test_ranks_may_cut_copies_at_other_places(cluster_of: Clusters, layout: str, tmp_path: Path) -> None:
    """A tied table is most of either stage, and shares end in it. tp's ranks have 167 and 166 of its rows."""

    def prepared(layout: str, seed: int) -> md.Engine:
        shape = config("byte-tiny", vocabulary=333, context=8, layers=2, heads=2, width=8)
        model = GPT(shape, seed=seed, dtype=torch.float64)
        adam = partial(torch.optim.Adam, lr=1e-2, eps=1e-3)
        return md.prepare(model, adam, md.Layout.parse(layout))

    def train(layout: str, resumes: bool) -> list[dict[str, Tensor]]:
        """The state after each of two steps; the second one may resume the first in another layout."""
        tokens = torch.arange(32).view(4, 8) * 10
        engine, found = prepared(layout, 0), []
        for step in range(2):
            if step and resumes:
                md.save(engine, tmp_path)
                engine = prepared("dp=4", 1)
                md.load(engine, tmp_path)
            engine.step(contract.own_rows(engine, (tokens, tokens)))
            found.append(engine.full_state_dict())
        return found

    expected = cluster_of(4).run(train, "dp=4", False)[0]
    for found in cluster_of(4).run(train, layout, True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
