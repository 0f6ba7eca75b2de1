"""Attention that counts its heads: the weights of one process, dropout, and what an error puts back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import FusedAttention, vectors
from tests.helpers.on_ranks import on_ranks


class SplitAttention(nn.Module):
    """The same as in many a small GPT: the matrix is split by the width of the model."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(rows, length, self.n_head, width // self.n_head).transpose(1, 2) for y in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).contiguous().view(rows, length, width))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(12), attention
        self.mlp = nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Dropout(0.0), nn.Linear(7, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Blocks(nn.Module):
    """Patches of an image, blocks with one of these, and classes."""

    def __init__(self, attention: Callable[[int, int], nn.Module], seed: int, heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(Block(attention(12, heads)) for _ in range(2)))
        self.head = nn.Linear(12, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 12) -> (B, 4)
        return self.head(self.blocks(x).mean(1))


patches = partial(vectors, width=12, length=5, classes=4)


@pytest.mark.parametrize(
    ("attention", "layout"),
    [
        (FusedAttention, "tp=3"),
        (SplitAttention, "tp=3"),
        (FusedAttention, "tp=2,recompute=True"),
        (SplitAttention, "dp=2,tp=2,zero=3"),
    ],
)
def test_models_that_count_heads_train_to_the_weights_of_one_process(
    cluster_of: Clusters, attention: Callable[[int, int], nn.Module], layout: str
) -> None:
    case = contract.Case(partial(Blocks, attention), patches, batches=(4, 3, 5))
    contract.check(cluster_of, case, layout)


@on_ranks(2)
def test_a_fault_in_a_plan_that_was_found_is_caught() -> None:
    class Other(FusedAttention):
        """Queries, keys and values of one head after another, under the same names."""

        def forward(self, x: Tensor) -> Tensor:
            rows, length, width = x.shape
            qkv = self.qkv(x).reshape(rows, length, self.num_heads, 3, self.head_dim)
            mixed = functional.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4))
            return self.proj(mixed.transpose(1, 2).reshape(rows, length, width))

    engine = md.prepare(Blocks(Other, 0), torch.optim.AdamW, md.Layout(tp=2), rehearse=True)
    with pytest.raises(ValueError, match=r"makes another model: the output of blocks.0.attn.proj differs"):
        engine.step(*patches(torch.Generator().manual_seed(0), 4))
