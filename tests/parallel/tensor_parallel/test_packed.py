"""Layers that hold several matrices below each other: the weights of one process, and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist.parallel.tensor_parallel.cuts import Cut, cuts
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.on_ranks import on_ranks

PARSE = md.Layout.parse


class Packed(nn.Module):
    """A block with a fused qkv of four heads, and a SwiGLU of ragged size in one matrix.

    A key's bias would have gradients of rounding alone, which Adam magnifies: there is none.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head_dim = 2
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 18), "down": nn.Linear(9, 8)})
        self.head = nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 8) -> (B, T, 4)
        heads = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        q, k, v = (y.transpose(-3, -2) for y in heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        gate, up = self.mlp["up"](x).chunk(2, dim=-1)
        return self.head(x + self.mlp["down"](functional.silu(gate) * up))


PLAN = {
    "qkv": "column_packed=3",
    "out": "row",
    "mlp.up": "column_packed=2",
    "mlp.down": "row",
}


def rows(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (count, 6), generator=generator)


CASE = contract.Case(Packed, rows, batches=(4, 3, 5), clip_norm=0.3)


@pytest.mark.parametrize(
    "layout", ["tp=2", "tp=3", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=2", "dp=2,tp=2,zero=3"]
)
def test_packed_matrices_train_to_the_weights_of_one_process(cluster_of: Clusters, layout: str) -> None:
    contract.check(cluster_of, CASE, layout, plan=PLAN)


@on_ranks(3)
def test_a_rank_has_its_heads_of_each_matrix() -> None:
    model = Packed(0)
    parallelize(model, PLAN)
    whole, rank = Packed(0).qkv.weight.detach().unflatten(0, (3, 8)), md.rank()
    weight, found, text = model.qkv.weight.detach(), cuts(model), str(model.qkv)
    start, stop = ((0, 2), (2, 4), (4, 8))[rank]
    torch.testing.assert_close(weight, whole[:, start:stop].flatten(0, 1), rtol=0, atol=0)
    assert found["qkv.weight"] == Cut((24, 8), (start, 0), (stop - start, 8), 3)
    assert found["mlp.up.bias"] == Cut((18,), (3 * rank,), (3,), 2)
    assert f"3 times {start}-{stop} of 8" in text


@pytest.mark.parametrize("after", ["dp=1", "tp=3", "dp=2,tp=2,zero=1"])
def test_checkpoints_do_not_know_of_the_ranks(cluster_of: Clusters, tmp_path: Path, after: str) -> None:
    contract.check_continues(cluster_of, tmp_path, CASE, "tp=2", after, plan=PLAN)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"qkv": "column_packed=5"}, "qkv with style 'column_packed=5': 5 equal matrices have no 24 outputs"),
        ({"qkv": "column_packed"}, "unknown style 'column_packed': did you mean 'column_packed=3'"),
        ({"qkv": "column_packed=0"}, "unknown style 'column_packed=0': did you mean 'column_packed=3'"),
    ],
)
def test_packed_styles_that_do_not_fit_are_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(Packed(0), plan)
    with pytest.raises(ValueError, match="a layer with 9 outputs is not 2 equal matrices"):
        md.ColumnParallelLinear(4, 9, packed=2)
