"""LoRA around the layers of a plan: the base is cut, and the adapter's matrix on the same side with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.tensor_parallel import heads
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.models import FusedAttention
from tests.parallel.tensor_parallel.test_heads import Blocks, SplitAttention, patches


class LoRA(nn.Module):
    """A layer with an adapter, in the form of peft's."""

    def __init__(self, layer: nn.Linear, drop: float) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(drop) if drop else nn.Identity()})
        down, up = nn.Linear(layer.in_features, 3, bias=False), nn.Linear(3, layer.out_features, bias=False)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        for name, down in self.lora_A.items():
            y = y + self.lora_B[name](down(self.lora_dropout[name](x))) * 0.5
        return y


def adapted(model: nn.Module, drop: float = 0.0) -> nn.Module:
    for part in [*model.modules()]:
        for name, child in [*part.named_children()]:
            if type(child) is nn.Linear and not isinstance(part, LoRA | nn.ModuleDict):
                setattr(part, name, LoRA(child, drop))
    return model.double()


def blocks(attention: Any, seed: int, drop: float = 0.0) -> nn.Module:
    return adapted(Blocks(attention, seed, 4), drop)


def gpt(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return adapted(models.gpt(seed))


CASES = {
    "fused": contract.Case(partial(blocks, FusedAttention), patches),
    "split": contract.Case(partial(blocks, SplitAttention), patches),
    "gpt": contract.Case(gpt, models.tokens),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("fused", "tp=2"),
        ("split", "tp=2"),
        ("split", "dp=2,tp=2,zero=1"),
        ("gpt", "tp=2"),
        ("gpt", "tp=2,sequence_parallel=True"),
        ("gpt", "pp=2,tp=2,micro_batches=2"),
    ],
)
def test_adapters_train_to_the_weights_of_one_process(cluster_of: Clusters, name: str, layout: str) -> None:
    contract.check(cluster_of, CASES[name], layout)


@pytest.mark.parametrize(
    "styles", [{"mlp.0": "column", "mlp.3": "row"}, {"mlp.0": "column_gathered", "mlp.3": "row_split"}]
)
def test_which_matrices_are_cut(cluster_of: Clusters, styles: dict[str, str]) -> None:
    """Where a layer's inputs and outputs are whole, so is its adapter."""
    plan = {f"blocks.*.{name}": style for name, style in styles.items()}

    def shapes() -> list[tuple[int, ...]]:
        engine = md.prepare(blocks(SplitAttention, 0), contract.ADAMW, md.Layout(tp=2), plan=plan)
        mlp: Any = engine.model.get_submodule("blocks.1.mlp")
        layers = [
            (each.base_layer, each.lora_A["default"], each.lora_B["default"]) for each in (mlp[0], mlp[3])
        ]
        return [tuple(layer.weight.shape) for each in layers for layer in each]

    contract.check(cluster_of, CASES["split"], md.Layout(tp=2), plan=plan)
    first = (3, 12), (3, 12), (3, 3) if styles["mlp.0"] == "column" else (7, 3)
    second = (12, 3), (3, 3) if styles["mlp.3"] == "row" else (3, 7), (12, 3)
    assert cluster_of(2).run(shapes)[0] == [*first, *second]


@pytest.mark.parametrize("fault", [False, True])
def test_ranks_drop_the_same_inputs_of_an_adapter(cluster_of: Clusters, fault: bool) -> None:
    """The planted fault: in attention each rank draws its own."""

    def train() -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if fault:
                patch.setattr(
                    heads._OwnHeads, "_drop_alike", lambda self, number, part, group, own, x: own(x)
                )
            engine = md.prepare(blocks(SplitAttention, 0, 0.4), contract.ADAMW, md.Layout(tp=2))
            for inputs, targets in CASES["split"].global_batches():
                engine.step(inputs, targets)
            return {name: value for name, value in engine.whole() if "lora" in name}

    first, second = cluster_of(2).run(train)
    assert len(first) == 2 * 9  # of two blocks, and the head
    assert all(torch.equal(value, second[name]) for name, value in first.items()) != fault
