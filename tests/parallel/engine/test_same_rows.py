"""Ranks that have to pass the same rows are told if they do not: in the first step, rehearsed or not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import minidist as md
from minidist.comm.ledgers import held_back
from minidist.parallel.engine import same_rows
from tests.helpers.models import Chain
from tests.helpers.on_ranks import on_ranks

SGD = partial(torch.optim.SGD, lr=0.1)
SAYS = r"^ranks 0 and 1 were given different rows.*pick them by engine\.data_rank"


def engine_of(layout: str, rehearse: bool, loss: Any = functional.mse_loss) -> md.Engine:
    torch.manual_seed(0)
    model, parsed = Chain(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), md.Layout.parse(layout)
    plan = {"layers.0": "column", "layers.2": "row"} if parsed.tp > 1 else None
    return md.prepare(model, SGD, parsed, loss, plan=plan, rehearse=rehearse)


@on_ranks(2, layout=["pp=2", "tp=2"], rehearse=[True, False], differs=["inputs", "targets", "rows"])
def test_other_rows_are_refused_in_the_first_step(layout: str, rehearse: bool, differs: str) -> None:
    engine, other = engine_of(layout, rehearse), md.rank()
    x, y = torch.randn(2, 4 + other * (differs == "rows"), 8, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match=SAYS):
        engine.step(x + other * (differs == "inputs"), y + other * (differs == "targets"))
    assert engine.step(x[:4] * 0, y[:4] * 0) >= 0  # and training goes on with the same ones


@on_ranks(2, layout=["pp=2", "dp=2"])
def test_it_costs_a_settled_step_nothing_and_data_ranks_pass_rows_of_their_own(layout: str) -> None:
    engine, asked = engine_of(layout, rehearse=False), list[int]()
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)) + (layout == "dp=2") * md.rank()

    def counted() -> Any:
        asked.append(step)
        return held_back()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_rows, "held_back", counted)
        for step in range(4):  # noqa: B007 (`counted` uses it)
            engine.step(x, y)
    assert asked == ([0] if layout == "pp=2" else [])


@on_ranks(2, layout=["pp=2", "tp=2", "dp=2"])
def test_loaders_that_end_apart_are_refused_where_ranks_pass_the_same(layout: str) -> None:
    engine, data = engine_of(layout, rehearse=False), [(torch.ones(4, 8), torch.ones(4, 8))] * 3
    if layout == "dp=2":  # the rank whose loader has ended takes part with weight 0
        assert len([engine.step(*batch) for batch in engine.batches(data[md.rank() :])]) == 3
        return
    says = r"^ranks 0 and 1 were given different numbers of batches.*pick them by engine\.data_rank"
    with pytest.raises(ValueError, match=says):
        [engine.step(*batch) for batch in engine.batches(data[md.rank() :])]
    with pytest.raises(ValueError, match=says):
        engine.evaluate(data[md.rank() :])
    assert len([engine.step(*batch) for batch in engine.batches(data)]) == 3


@on_ranks(2)
def test_a_batch_may_be_a_dict_with_its_keys_in_another_order() -> None:
    engine = engine_of("pp=2", False, lambda out, y: (out - y["b"]).square().mean() + y["a"].mean())
    parts = [("a", torch.zeros(4, 2)), ("b", torch.ones(4, 8))]
    assert engine.step(torch.ones(4, 8), dict(parts[:: 1 - 2 * md.rank()])) >= 0
