"""`parameter.data = tensor` while a parameter lies in flat memory: refused, and named, before it is used."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks

ADAMW = partial(torch.optim.AdamW, lr=0.05)
REFUSED = (
    r"was given other memory.*write into it instead: `with torch\.no_grad\(\): parameter\.copy_\(tensor\)"
)


def net(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (6,), generator=generator)


def assign(model: Any, how: str) -> None:
    """Other memory for parameters, in each way that people do it."""
    first, last = model[0], model[2]
    if how == "vector":
        whole = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(whole * 0.5, model.parameters())
    elif how == "one":
        last.weight.data = torch.full((3, 5), 0.25, dtype=last.weight.dtype)
    elif how == "transposed":  # at the same address
        first.weight.data = first.weight.data.t()
    elif how == "part":  # of the memory of another: row 0 of the weight
        first.bias.data = first.weight.data[0]
    elif how == "kept":  # new memory with the old values
        last.weight.data = last.weight.data.clone()
    elif how == "shape":
        last.weight.data = torch.zeros(5, 3, dtype=last.weight.dtype)
    elif how == "dtype":
        model.float()


EVERY = r"\d\.\w+"  # the message names the first one that it finds
HOWS = {
    "vector": EVERY,
    "one": "2.weight",
    "transposed": "0.weight",
    "part": "0.bias",
    "kept": "2.weight",
    "shape": "2.weight",
    "dtype": EVERY,
}


@on_ranks(2, zero=[1, 2], how=[*HOWS])
def test_the_next_step_refuses_it(zero: int, how: str) -> None:
    model, n = net(), md.size()
    engine = md.prepare(model, ADAMW, md.Layout(dp=n, zero=zero))
    x, y = batch(0)
    engine.step(x[md.rank() :: n], y[md.rank() :: n])
    assign(model, how)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"the parameter {HOWS[how]} {REFUSED}"):
            engine.step(x[md.rank() :: n], y[md.rank() :: n])


@pytest.mark.parametrize("zero", range(3))
def test_values_that_are_copied_in_are_what_training_goes_on_from(cluster_of: Clusters, zero: int) -> None:
    def train(layout: md.Layout | None = None) -> Any:
        model, n = net(), md.size() if layout else 1
        engine = md.prepare(model, ADAMW, layout or md.Layout())
        rank, found = md.rank() if layout else 0, []
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    model[2].weight.copy_(torch.full((3, 5), 0.25))
            x, y = batch(step)
            found.append(engine.step(x[rank::n], y[rank::n]))
        return found

    expected = train()
    for found in cluster_of(2).run(train, md.Layout(dp=2, zero=zero)):
        assert found == pytest.approx(expected, rel=1e-10)


@on_ranks(2, how=[*HOWS])
def test_summon_refuses_it_and_leaves_the_shards_as_they_were(how: str) -> None:
    sharded, reference = md.FullyShard(net(), ADAMW), net()

    def summoned() -> None:
        with sharded.summon() as model:
            assign(model, how)

    with pytest.raises(ValueError, match=f"the parameter {HOWS[how]} {REFUSED}"):
        summoned()
    torch.testing.assert_close(sharded.state_dict(), dict(reference.state_dict()), rtol=0, atol=0)
    assert torch.isfinite(sharded(batch(0)[0])).all()


def test_a_forward_pass_refuses_what_was_assigned_outside_of_summon() -> None:
    model = net()
    sharded = md.FullyShard(model, ADAMW)
    assign(model, "one")
    with pytest.raises(ValueError, match=f"the parameter 2.weight {REFUSED}"):
        sharded(batch(0)[0])
