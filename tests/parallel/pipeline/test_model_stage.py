"""Pipelines of models that are more than their layers: transformers' models, and GPTs of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from tests.helpers import contract

Clusters = Callable[[int], md.Cluster]
PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)


class Logits(nn.Module):
    """A model of transformers that gives a tensor."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.inner = hugging_face(name, seed)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x).logits
        return logits


def tokens(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 17, (count, 8), generator=generator)
    return text[:, :-1], text[:, 1:]


def images(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, 2, (count,), generator=generator)


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def hugging_face(name: str, seed: int) -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(seed)
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=17, **SIZES, num_key_value_heads=1)
        model: Any = hf.LlamaForCausalLM(config)
        for part in [*model.modules()]:
            for key, norm in part.named_children():
                if type(norm).__name__ == "LlamaRMSNorm":  # which computes in float32
                    setattr(part, key, nn.RMSNorm(16, norm.variance_epsilon))
    elif name == "gpt2":
        sizes: Any = {"n_embd": 16, "n_layer": 6, "n_head": 2, "n_positions": 16}
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=17, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        )
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(vocab_size=17, **SIZES, **QUIET))
    else:
        model = hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **SIZES, **QUIET))
    return model.double()


class Block(nn.Module):
    """A layer of a small GPT: gets a mask and a bias beside its input, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.norm = nn.Linear(12, 12), nn.Linear(12, 12), nn.LayerNorm(12)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = (self.mix(self.norm(x)) @ x.mT + bias).masked_fill(mask, -1e9).softmax(-1)
        return x + self.up(scores @ x), scores


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
    if name == "own":
        return contract.Case(OwnGPT, tokens, SGD, batches=(9, 8), clip_norm=0.5)
    rows = images if name == "vit" else tokens
    return contract.Case(partial(Logits, name), rows, SGD, (9, 8), clip_norm=0.5)


EXAMPLES = {"vit": torch.zeros(1, 3, 8, 8).double(), "own": torch.zeros(1, 3, dtype=torch.int64)}
NAMES = ["llama", "gpt2", "bert", "vit", "own"]
TWO = "pp=2,schedule=interleaved,chunks=2,micro_batches=2"
LAYOUTS = [
    "pp=4,micro_batches=2",
    "pp=2,schedule=zero_bubble,micro_batches=3",
    "pp=3,schedule=gpipe,micro_batches=2,recompute=true",
    "dp=2,pp=2,zero=1",
    "dp=2,pp=2,micro_batches=2",
    "pp=3,chunks=2,schedule=interleaved",
]


@pytest.mark.parametrize("name", NAMES)
def test_models_train_as_in_one_process(cluster_of: Clusters, name: str) -> None:
    check(cluster_of, name, TWO)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["own", *(pytest.param(n, marks=pytest.mark.deep) for n in NAMES[:-1])])
def test_every_kind_of_layout(cluster_of: Clusters, name: str, layout: str) -> None:
    check(cluster_of, name, layout)


def check(cluster_of: Clusters, name: str, layout: str) -> None:
    if name != "own":
        pytest.importorskip("transformers", reason="the models are those of transformers")
    example = EXAMPLES.get(name, EXAMPLES["own"])
    contract.check(cluster_of(PARSE(layout).ranks), case(name), PARSE(layout), example=example)
