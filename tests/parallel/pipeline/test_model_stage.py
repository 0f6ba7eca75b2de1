"""Pipelines of models that are more than their layers: transformers' models, and GPTs of one's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.engine import staged_passes
from minidist.parallel.pipeline.model_stage import ModelStage
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import Logits, images, tokens

PRELOAD = ["transformers.models.llama.modeling_llama"]

PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)


class Block(nn.Module):
    """A layer of a small GPT: gets a mask and a bias beside its input, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = (self.mix(self.norm(x)) @ x.mT + bias).masked_fill(mask, -1e9).softmax(-1)
        return x + self.down(self.up(scores @ x).relu()), scores


class OwnGPT(nn.Module):
    """Its head stands before its blocks, it uses its token table directly, and a bias goes to every block."""

    def __init__(self, seed: int, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head_norm = nn.LayerNorm(12)
        self.positions = nn.Parameter(torch.randn(16, 12))
        self.token = nn.Embedding(17, 12)
        self.bias = nn.Parameter(torch.randn(16, 16))
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.register_buffer("mask", torch.ones(16, 16).triu(1).bool())
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.token(ids) + self.positions[:length]
        for block in self.blocks:
            x, _ = block(x, self.mask[:length, :length], bias=self.bias[:length, :length])
        return self.head_norm(x) @ self.token.weight.T


def case(name: str) -> contract.Case:
    rows = images if name == "ViT" else partial(tokens, length=7)
    model = OwnGPT if name == "own" else partial(Logits, name, **LAYERS[name == "GPT-2"])
    return contract.Case(model, rows, SGD, (9, 8), clip_norm=0.5)


LAYERS = {"num_hidden_layers": 6}, {"n_layer": 6}
EXAMPLES = {"ViT": torch.zeros(1, 3, 8, 8).double(), "own": torch.zeros(1, 3, dtype=torch.int64)}
NAMES = ["Llama", "GPT-2", "BERT", "ViT", "own"]
TWO = "pp=2,schedule=interleaved,chunks=2,micro_batches=2"
LAYOUTS = [
    "pp=4,micro_batches=2",
    "pp=2,schedule=zero_bubble,micro_batches=3",
    "pp=3,schedule=gpipe,micro_batches=2,recompute=true",
    "dp=2,pp=2,zero=1",
    "tp=2,pp=2,micro_batches=2",
    "pp=3,chunks=2,schedule=interleaved",
]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.deep if n in ("GPT-2", "BERT") else []) for n in NAMES]
)
def test_models_train_as_in_one_process(cluster_of: Clusters, name: str) -> None:
    check(cluster_of, name, TWO)


# Each other model runs in every second layout.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("own", layout) for layout in LAYOUTS),
        *(
            pytest.param(name, layout, marks=pytest.mark.deep)
            for number, name in enumerate(NAMES[:-1])
            for layout in LAYOUTS[number % 2 :: 2]
        ),
    ],
)
def test_every_kind_of_layout(cluster_of: Clusters, name: str, layout: str) -> None:
    check(cluster_of, name, layout)


def check(cluster_of: Clusters, name: str, layout: str) -> None:
    if name != "own":
        pytest.importorskip("transformers", reason="the models are those of transformers")
        layout = layout.replace("tp=2", "dp=2")
    plan = {"blocks.*.up": "column", "blocks.*.down": "row"} if "tp" in layout else None
    example = EXAMPLES.get(name, EXAMPLES["own"])
    contract.check(cluster_of, case(name), layout, example=example, plan=plan)


# The point of it: each stage has its share.


def held(name: str) -> tuple[set[str], int, int]:
    """The names of this stage's parameters, their elements, and those of the whole model."""
    model = case(name).model(0)
    whole = sum(p.numel() for p in model.parameters())
    md.prepare(model, SGD, PARSE("pp=3"), example=EXAMPLES.get(name, EXAMPLES["own"]))
    own = dict(model.named_parameters())
    return set(own), sum(p.numel() for p in own.values()), whole


@pytest.mark.parametrize("name", ["own", "GPT-2"])
def test_a_stage_holds_its_layers_and_what_it_needs_beside_them(cluster_of: Clusters, name: str) -> None:
    if name != "own":
        pytest.importorskip("transformers", reason="the model is that of transformers")
    found = cluster_of(3).run(held, name)
    blocks = "blocks" if name == "own" else "inner.transformer.h"
    outside = [{each for each in names if not each.startswith(blocks)} for names, *_ in found]
    if name == "own":
        assert outside == [
            {"token.weight", "positions", "bias"},
            {"bias"},  # which the model gives to every layer
            {"token.weight", "bias", "head_norm.weight", "head_norm.bias"},
        ]
    else:
        table = "inner.transformer.wte.weight"
        norm = {f"inner.transformer.ln_f.{each}" for each in ("weight", "bias")}
        assert outside == [{table, "inner.transformer.wpe.weight"}, set(), {table, *norm}]
    own = [{name for name in names if name.startswith(blocks)} for names, *_ in found]
    assert sum(map(len, own)) == len(set.union(*own))  # no layer is held twice
    twice = 17 * 12 + 2 * 16 * 16 if name == "own" else 13 * 16
    assert sum(elements for _, elements, _ in found) == found[0][2] + twice


@contract.instead_of(ModelStage, "__init__")
def without_one(init: Any, self: Any, model: Any, trace: Any, layers: range) -> None:
    init(self, model, trace, layers[1:] if layers.start else layers)


FAULTS = {
    "another layer": without_one,
    "no bias": contract.patched(staged_passes, "sum_tied", contract.nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(cluster_of: Clusters, fault: str) -> None:
    contract.check_catches(cluster_of, FAULTS[fault], case("own"), "pp=2", example=EXAMPLES["own"])


# What an engine does with it.


@pytest.mark.parametrize("layouts", [("dp=2,pp=2,zero=1", "pp=3"), ("pp=2", "dp=2")])
def test_layouts_of_checkpoints(cluster_of: Clusters, tmp_path: Path, layouts: tuple[str, str]) -> None:
    longer = replace(case("own"), batches=(9, 8, 7))
    contract.check_continues(cluster_of, tmp_path, longer, *layouts, example=EXAMPLES["own"])


def test_a_model_on_the_meta_device(cluster_of: Clusters) -> None:
    def train() -> list[float]:
        with torch.device("meta"):
            model = OwnGPT(0)
        engine = md.prepare(model, SGD, PARSE("pp=2"), example=EXAMPLES["own"], initialize=ones)
        return [engine.step(*batch) for batch in case("own").global_batches()]

    model = OwnGPT(0)
    for part in model.modules():
        ones(part)
    expected = contract.train_in_one_process(replace(case("own"), model=lambda _: model, clip_norm=None))
    for losses in cluster_of(2).run(train):
        torch.testing.assert_close(losses, expected.losses, rtol=1e-10, atol=0.0)


def ones(part: nn.Module) -> None:
    for number, parameter in enumerate(part._parameters.values()):
        nn.init.constant_(parameter, 0.1 + number)
    if "mask" in part._buffers:
        part.mask = torch.ones(16, 16).triu(1).bool()
