"""`parameter.data = tensor` while a parameter lies in flat memory: the next step goes on from its values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md

Clusters = Callable[[int], md.Cluster]
ADAMW = partial(torch.optim.AdamW, lr=0.05)


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
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


def losses(
    step_on: Callable[[Any, Any], float], model: nn.Module, how: str, dtype: torch.dtype
) -> list[float]:
    found = []
    for step in range(6):
        if step == 2:
            assign(model, how)
        x, y = batch(step, dtype)
        found.append(step_on(x, y))
    return found


def in_one_process(how: str) -> tuple[list[float], nn.Module]:
    model = net()
    optimizer = ADAMW(model.parameters())

    def step(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    if how == "part":  # in one process the two would share memory from then on
        return [], model
    return losses(step, model, how, torch.float64), model


@pytest.mark.parametrize("how", ["vector", "one", "transposed", "part", "kept"])
@pytest.mark.parametrize("zero", range(3))
def test_a_step_goes_on_from_them(cluster_of: Clusters, zero: int, how: str) -> None:
    def train() -> Any:
        model, n = net(), md.size()
        engine = md.prepare(model, ADAMW, md.Layout(dp=n, zero=zero))
        found = losses(
            lambda x, y: engine.step(x[md.rank() :: n], y[md.rank() :: n]), model, how, torch.float64
        )
        return found, engine.full_state_dict()

    if how == "part":
        if zero:
            for _, state in cluster_of(2).run(train):
                assert not torch.equal(state["0.bias"], state["0.weight"][0]), "they share memory"
        return
    expected, reference = in_one_process(how)
    for found, state in cluster_of(2).run(train):
        assert found == pytest.approx(expected, rel=1e-10)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("zero", [1, 2])
def test_copies_in_float32_follow(cluster_of: Clusters, zero: int) -> None:
    """The same weights, in other memory, change nothing; others are the ones that training goes on from."""

    def train(how: str) -> Any:
        model, n = net(torch.float32), md.size()
        engine = md.prepare(model, ADAMW, md.Layout(dp=n, zero=zero, precision="bf16"))
        found = losses(
            lambda x, y: engine.step(x[md.rank() :: n], y[md.rank() :: n]), model, how, torch.float32
        )
        return found, {name: value.float() for name, value in engine.full_state_dict().items()}

    plain, kept, one = (cluster_of(2).run(train, how)[0] for how in ("none", "kept", "one"))
    assert kept[0] == plain[0]
    torch.testing.assert_close(kept[1], plain[1], rtol=0, atol=0)
    moved = (one[1]["2.weight"] - 0.25).abs()
    assert 0 < moved.max() < 6 * 0.05, "the steps after it went on from 0.25"


@pytest.mark.parametrize("zero", [1, 2])
def test_a_checkpoint_has_them_before_the_next_step(zero: int, tmp_path: Any) -> None:
    model = net(torch.float32)
    engine = md.prepare(model, ADAMW, md.Layout(zero=zero, precision="bf16"))
    engine.step(*batch(0, torch.float32))
    assign(model, "one")
    md.save(engine, tmp_path / "saved").wait()
    fresh = md.prepare(net(torch.float32), ADAMW, md.Layout(zero=zero, precision="bf16"))
    md.load(fresh, tmp_path / "saved")
    assert (fresh.full_state_dict()["2.weight"] == 0.25).all()


def test_another_shape_or_dtype_is_an_error() -> None:
    model = net()
    engine = md.prepare(model, ADAMW, md.Layout(zero=1))
    engine.step(*batch(0, torch.float64))
    model.float()
    with pytest.raises(ValueError, match=r"in torch\.float64 on cpu was given data of .* torch\.float32"):
        engine.step(*batch(1, torch.float32))


@pytest.mark.parametrize("how", ["vector", "one", "transposed", "kept"])
def test_what_is_assigned_in_summon_is_kept(cluster_of: Clusters, how: str) -> None:
    def check() -> None:
        sharded, reference = md.FullyShard(net(), ADAMW), net()
        with sharded.summon() as model:
            assign(model, how)
        assign(reference, how)
        torch.testing.assert_close(sharded.state_dict(), dict(reference.state_dict()), rtol=0, atol=0)
        assert torch.isfinite(sharded(batch(0, torch.float64)[0])).all()

    cluster_of(2).run(check)


def test_another_shape_in_summon_is_an_error_and_leaves_it_usable() -> None:
    sharded = md.FullyShard(net(), ADAMW)

    def assign() -> None:
        with sharded.summon() as module:
            model: Any = module
            model[2].weight.data = torch.zeros(5, 3).double()

    with pytest.raises(ValueError, match=r"shape \(3, 5\) .* was given data of shape \(5, 3\)"):
        assign()
    torch.testing.assert_close(sharded.state_dict(), dict(net().state_dict()), rtol=0, atol=0)
