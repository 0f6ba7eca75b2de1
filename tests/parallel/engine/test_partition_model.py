"""A rank's part of a model: what it needs of the model, and what an engine does with it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import GPT, config
from minidist.parallel.engine.partition_model import RemoteLayer
from minidist.parallel.training.precision import LossScale
from tests.checkpoint.test_checkpoint import check_other_layout
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import Chain
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refused_on_ranks
from tests.parallel.sharding.cases import CASES
from tests.parallel.test_layouts import CASE, gpt

PARSE = md.Layout.parse


def chain(seed: int) -> nn.Module:
    """Layers with statistics that training changes, of any number of features."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.ReLU(), nn.Linear(5, 7))
    return Chain(nn.Linear(6, 5), nn.BatchNorm1d(5), inner, nn.Linear(7, 3)).double()


def named(seed: int) -> nn.Module:
    """Layers with names, of which some have no parameters, and one writes to its input."""
    torch.manual_seed(seed)
    layers = {"up": nn.Linear(6, 9), "bend": nn.ReLU(inplace=True), "down": nn.Linear(9, 3)}
    model = nn.Module()
    model.layers = nn.Sequential(OrderedDict(layers))
    model.forward = model.layers.forward  # type: ignore[method-assign,assignment]
    return model.double()


NAMED = replace(CASES["mlp"], model=named, clip_norm=0.1)


@pytest.mark.parametrize(("before", "after"), [("pp=3", "dp=1"), ("dp=1", "pp=3,zero=1"), ("pp=3", "dp=2")])
def test_checkpoints_of_a_stage_without_parameters(
    cluster_of: Clusters, tmp_path: Path, before: str, after: str
) -> None:
    check_other_layout(
        cluster_of, tmp_path, replace(NAMED, batches=(9, 8, 7, 9)), PARSE(before), PARSE(after)
    )


def train_in_halves(
    layout: md.Layout, **options: Any
) -> tuple[list[float], list[float], list[int], dict[str, Tensor]]:
    """Four steps; in the second an infinite gradient comes up on the last rank alone."""
    model = GPT(config("byte-tiny", vocabulary=11, context=13, layers=2, heads=8, width=16), seed=md.rank())
    engine = md.prepare(
        model,
        partial(torch.optim.AdamW, lr=1e-2),
        layout,
        loss_scale=LossScale(2.0**10) if layout.precision == "fp16" else None,
        clip_norm=1.0,
        **options,
    )
    batch, _ = CASE.global_batches()
    losses, scales, skipped = [], [], []
    last = [*engine.model.parameters()][-1]
    for step in range(4):
        poison = step == 1 and md.rank() == md.size() - 1 and layout.precision == "fp16"
        hook = last.register_hook(lambda grad: grad * math.inf) if poison else None
        losses.append(engine.step(contract.own_rows(engine, batch)))
        if hook is not None:
            hook.remove()
        scales.append(engine.loss_scale)
        skipped.append(engine.skipped)
    return losses, scales, skipped, engine.full_state_dict()


HALVES: list[tuple[str, dict[str, Any]]] = [
    ("tp=2,pp=2,micro_batches=2", {}),
    ("dp=2,pp=2,zero=1", {}),
    ("tp=2,cp=2,zero=3", {}),
    ("dp=4,zero=1,shard=2,micro_batches=2", {}),
    ("dp=4,zero=3,shard=2", {}),
    ("dp=4,zero=3,micro_batches=2", {"fully_shard": {"secondary": 2}}),
]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_all_axes(cluster_of: Clusters, precision: str) -> None:
    alone, *_ = cluster_of(1).run(train_in_halves, md.Layout(precision=precision))
    for text, options in HALVES if precision == "bf16" else HALVES[:2]:
        layout = replace(PARSE(text), precision=precision)
        found = cluster_of(4).run(train_in_halves, layout, **options)
        for losses, scales, skipped, weights in found:
            # A bfloat16 has 8 bits, and 4 steps of 0.01 lead through as many roundings.
            torch.testing.assert_close(losses, alone[0], rtol=0.02, atol=0.0)
            assert (scales, skipped) == (alone[1], alone[2])
            torch.testing.assert_close(weights, found[0][3], rtol=0, atol=0)
    assert alone[2] == ([0, 1, 1, 1] if precision == "fp16" else [0] * 4)


def test_other_stages_layers_are_not_here(cluster_of: Clusters) -> None:
    def look() -> tuple[list[bool], str]:
        model = CASE.model(0)
        md.prepare(model, CASE.optimizer, PARSE("pp=2"))
        with pytest.raises(RuntimeError) as caught:
            model(torch.zeros(1, 2, dtype=torch.int64))
        return [isinstance(layer, RemoteLayer) for layer in model.layers], str(caught.value)

    first, second = cluster_of(2).run(look)
    assert first[0] == [not here for here in second[0]]
    assert first[1].startswith("this layer is on stage 1 of the pipeline; call engine.step")


class OwnSGD(torch.optim.SGD):
    """It does not say whether it updates each element by itself."""


def beside() -> nn.Module:
    model = chain(0)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    return model


two_blocks = partial(gpt, 0, layers=2)
WRONG: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any], str]] = {
    "layers": (partial(chain, 0), "pp=5", {}, "pp is 5 with chunks=1, 5 parts, and the model has 4 layers"),
    "no chain": (lambda: nn.Linear(2, 2), "pp=2", {}, "pp is 2, and a Linear has no `layers`"),
    "beside": (beside, "pp=2", {}, "pp is 2, and the model's scale is in none of its `layers`"),
    "no attention": (partial(chain, 0), "cp=2", {}, "cp is for models with modules that have an attribute"),
    "no plan": (partial(chain, 0), "tp=2", {}, "no plan is known for a Chain; give one"),
    "stages": (
        two_blocks,
        "pp=2,zero=3",
        {},
        "zero=3 with pp=2 in the layout would send parameters",
    ),
    "plan": (two_blocks, "dp=2", {"plan": {}}, "plan is given and the layout has tp=1"),
    "matrices": (
        two_blocks,
        "tp=2",
        {"optimizer": partial(torch.optim.Adafactor, lr=0.1)},
        "optimizer is Adafactor, which needs whole parameters, and the layout has tp=2",
    ),
    "of the user's own": (
        two_blocks,
        "tp=2",
        {"optimizer": partial(OwnSGD, lr=0.1)},
        "A class of yours that updates each element by itself says so with `elementwise = True`",
    ),
    "all at once": (partial(chain, 0), "pp=2", {"optimizer": torch.optim.LBFGS}, "optimizer is LBFGS, which"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_names_the_axis(cluster_of: Clusters, name: str) -> None:
    model, text, options, message = WRONG[name]
    given = {"optimizer": CASE.optimizer, "layout": PARSE(text), **options}
    ranks = cluster_of(PARSE(text).ranks)
    refused_on_ranks(ranks, (ValueError, TypeError), message, lambda: md.prepare(model(), **given))


@on_ranks(2)
def test_rows_of_tokens_are_cut_alone() -> None:
    engine = md.prepare(CASE.model(0), CASE.optimizer, PARSE("cp=2"))
    told = r"inputs are \(2, 4\) and targets \(2,\), and cp=2 cuts rows of tokens; give \(B, T\)"
    with pytest.raises(ValueError, match=told):
        engine.step(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
