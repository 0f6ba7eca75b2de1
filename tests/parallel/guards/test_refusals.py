"""What would train wrongly, or fail in the middle of a step, is refused before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses

SGD = partial(torch.optim.SGD, lr=0.1)


@on_ranks(2, kind=[nn.Embedding, nn.EmbeddingBag])
def test_tables_that_renormalise_their_rows(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(1, 1), kind(5, 3, max_norm=0.5))
    makers: list[Callable[[], Any]] = [
        partial(md.prepare, model, SGD, md.Layout(dp=md.size(), zero=zero)) for zero in range(4)
    ]
    makers += [partial(md.DataParallel, model), partial(md.FullyShard, model, SGD)]
    for make in makers:
        with pytest.raises(ValueError, match=rf"1 is an {kind.__name__} with max_norm=0\.5, .*; leave"):
            make()
    whole = nn.Sequential(kind(5, 3))
    md.prepare(whole, SGD, md.Layout(dp=md.size()))


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(dtype)


BATCH = torch.ones(4, 5), torch.tensor([0, 1, 2, 0])


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(5, 3))


def frozen() -> nn.Module:
    return net().requires_grad_(False)


@pytest.mark.parametrize("zero", range(4))
def test_a_step_takes_tensors(zero: int) -> None:
    engine = md.prepare(net(), SGD, md.Layout(zero=zero))
    rows, classes = BATCH
    for inputs, targets, text in (
        ([1], [2], "the inputs are a list; give a tensor whose first dimension is the rows"),
        (rows, [2], "the targets are a list; give a tensor"),
        (rows, None, "the targets are a NoneType; give a tensor"),
        (torch.tensor(1.0), classes, "the inputs are a tensor without dimensions; give a tensor"),
    ):
        for call in (engine.step, engine.evaluate):
            with pytest.raises(TypeError, match=re.escape(text)):
                call(inputs, targets)  # type: ignore[arg-type]
    engine.step(*BATCH)


test_fully_shard = refuses(
    lambda **given: md.FullyShard(**{"module": net(), "optimizer_class": SGD, **given}),
    ({"units": nn.Linear}, TypeError, "units is <class 'torch.nn.modules.linear.Linear'>; give a list"),
    ({"units": 3}, TypeError, "units is 3; give a list of classes or modules"),
    ({"units": "Linear"}, TypeError, "units is 'Linear'; give a list of classes or modules"),
    ({"master": "float64"}, TypeError, "master is 'float64'; give a floating-point dtype"),
    ({"master": torch.int32}, TypeError, "master is torch.int32; give a floating-point dtype"),
    ({"optimizer_class": "adam"}, TypeError, "optimizer_class is 'adam'; give a class"),
    ({"optimizer_class": 3}, TypeError, "optimizer_class is int; give a class"),
    ({"optimizer_class": lambda p: 3}, TypeError, "optimizer_class made a int; give a function from"),
    ({"initialize": 3}, TypeError, "initialize is 3; give a function that fills a module's own"),
    ({"prefetch": "no"}, TypeError, "prefetch is 'no'; give True, False, or None"),
    ({"offload": ""}, "offload is '', which names no directory; give False, 'cpu' or a dir"),
    ({"module": nn.Tanh()}, "module has nothing to train, since it has no parameters"),
    ({"module": frozen()}, "module has nothing to train, since all of its parameters are"),
)


def test_data_parallel_and_zero_optimizer_take_no_meta_parameters() -> None:
    with pytest.raises(ValueError, match=r"module has 0\.weight on the meta device, without values"):
        md.DataParallel(meta())
    with pytest.raises(ValueError, match="params has 0 on the meta device, without values; build it"):
        md.ZeroOptimizer(meta().parameters(), torch.optim.SGD, lr=0.1)


test_zero_optimizer = refuses(
    lambda call: call(md.ZeroOptimizer(net().parameters(), torch.optim.SGD, lr=0.1)),
    (lambda own: own.load_state_dict({}), r"state_dict has the keys \[\]; give what an optimizer's"),
    (lambda own: own.load_state_dict({"state": {}}), r"state_dict has the keys \['state'\]; give what"),
    (lambda own: own.load_state_dict(3), "state_dict is 3; give what an optimizer's"),
    (lambda own: own.consolidate_state_dict("x"), "to is 'x'; give a rank of the group"),
    (lambda own: own.consolidate_state_dict(True), "to is True; give a rank of the group"),
    error=TypeError,
)
