"""A parameter is trained by one object at a time: the second is told, and the first's end makes room."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from minidist.parallel.guards import claims
from tests.helpers.contract import of_outputs, plain_steps
from tests.helpers.on_ranks import on_ranks

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def _few_objects() -> None:
    """Collections look at what a test makes, not at all that other files have left in this process."""
    gc.collect()
    gc.freeze()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 5, generator=generator).double()
    return x, torch.randint(0, 3, (6,), generator=generator)


def train(engine: Any, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        engine.step(x[md.rank() :: md.size()], y[md.rank() :: md.size()])


def prepared(model: nn.Module, zero: int) -> md.Engine:
    return md.prepare(model, SGD, md.Layout(dp=md.size(), zero=zero))


SECOND: dict[str, Callable[[nn.Module], Any]] = {
    **{f"zero={stage}": partial(prepared, zero=stage) for stage in range(4)},
    "DataParallel": md.DataParallel,
    "FullyShard": lambda model: md.FullyShard(model, SGD),
    "ZeroOptimizer": lambda model: md.ZeroOptimizer(model.parameters(), SGD),
}


@on_ranks(1, 2, first=[*range(4), "DataParallel", "FullyShard"])
def test_a_second_one_is_told(first: int | str) -> None:
    model = net()
    kept = SECOND[first if isinstance(first, str) else f"zero={first}"](model)
    if isinstance(first, int):
        train(kept, range(2))
    for name, make in SECOND.items():
        if (first, name) == ("DataParallel", "ZeroOptimizer"):
            continue  # they may stand beside each other
        sharded = first in (3, "FullyShard")
        text = "was sharded by .* new model" if sharded else "is trained by .*; train on with the first"
        with pytest.raises(ValueError, match=f"the parameter 0[.a-z]* {text}"):
            make(model)
    if isinstance(first, int):
        train(kept, range(2, 4))  # nothing has happened to it


@on_ranks(2, first=range(3), second=range(4))
def test_a_model_whose_engine_is_gone_is_free(first: int, second: int) -> None:
    model = net()
    engine = prepared(model, first)
    train(engine, range(2))
    del engine
    again = prepared(model, second)
    train(again, range(2, 4))
    reference, loss = net(), of_outputs(nn.functional.cross_entropy)
    plain_steps(reference, SGD(reference.parameters()), map(batch, range(4)), loss)
    state = again.full_state_dict()
    torch.testing.assert_close(state, dict(reference.state_dict()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [3, "FullyShard"])
def test_what_is_sharded_stays_so(first: int | str) -> None:
    model = net()
    sharded = SECOND[first if isinstance(first, str) else f"zero={first}"](model)
    state = sharded.full_state_dict() if isinstance(first, int) else sharded.state_dict()
    del sharded
    gc.collect()
    with pytest.raises(ValueError, match=r"0\.weight was sharded by .* into a new model"):
        md.DataParallel(model)
    fresh = net()
    fresh.load_state_dict(state)
    prepared(fresh, 3)


@on_ranks(2, stage=[1, 2])
def test_a_second_zero_optimizer_takes_over(stage: int) -> None:
    """Who loads a state into a new one has the old one still."""
    model, reference = net(), net()
    plain = SGD(reference.parameters(), momentum=0.9)
    make = partial(md.ZeroOptimizer, optimizer_class=SGD, stage=stage, momentum=0.9)
    first = make(model.parameters())
    optimizer = first
    for step in range(4):
        x, y = batch(step)
        nn.functional.cross_entropy(model(x[md.rank() :: 2]), y[md.rank() :: 2]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()
        if step == 1:
            states = []
            for to in range(2):
                first.consolidate_state_dict(to)
                states += [first.state_dict()] if md.rank() == to else []
            optimizer = make(model.parameters())
            optimizer.load_state_dict(states[0])
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"have been given to another since.*; step with that one"):
        first.step()


def test_who_may_share() -> None:
    model = net()
    wrapped = md.DataParallel(model)
    other = nn.Sequential(model[0].requires_grad_(False), nn.Linear(7, 2).double())
    md.DataParallel(other)  # a frozen part serves several
    copied = md.DataParallel(copy.deepcopy(wrapped.module))
    with pytest.raises(ValueError, match=r"2\.weight is trained by a DataParallel already"):
        md.DataParallel(copied.module)


def test_a_claim_ends_with_its_object_or_its_parameter() -> None:
    before = len(claims._claims)
    model = net()
    engine = prepared(model, 1)
    assert len(claims._claims) == before + 4
    del engine, model
    gc.collect()
    assert len(claims._claims) == before
