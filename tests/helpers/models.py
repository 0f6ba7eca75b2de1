"""Small models that tests of several folders train, and rows for them.

All are made in float64, with weights from their seed. `hugging_face` makes those of transformers; tests of
these models are skipped where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model import GPT, MLP, config


def tokens(
    generator: torch.Generator, count: int, length: int = 8, vocabulary: int = 11
) -> tuple[Tensor, Tensor]:
    """Rows of so many tokens, and the next ones."""
    text = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def vectors(
    generator: torch.Generator, count: int, *, width: int = 6, length: int | None = None, classes: int = 3
) -> tuple[Tensor, Tensor]:
    """Rows of one vector, or of so many, and a class for each row."""
    shape = (count, width) if length is None else (count, length, width)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (count,), generator=generator)


def images(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, 2, (count,), generator=generator)


def gpt(seed: int = 0, **changes: Any) -> GPT:
    """With tied ends, so that a parameter has two names, and a vocabulary that few ranks divide."""
    sizes = {"vocabulary": 11, "context": 8, "layers": 2, "heads": 2, "width": 8, **changes}
    return GPT(config("byte-tiny", **sizes), seed=seed, dtype=torch.float64)


def mlp(seed: int, sizes: tuple[int, ...] = (6, 5, 3)) -> MLP:
    return MLP(sizes, seed=seed, dtype=torch.float64)


class Chain(nn.Module):
    """Layers in a list, each called with what the one before gave."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Calls(nn.Module):
    """Calls a function with what is inside and the model's arguments."""

    def __init__(self, inner: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, *given: Any) -> Any:
        return self.function(self.inner, *given)


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype | None = torch.float64) -> Callable[[int], Any]:
    """From a seed to what `build` makes with it, in `dtype`, or as it is for None."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build().to(dtype) if dtype else build()

    return make


class FusedAttention(nn.Module):
    """Attention as in timm: one matrix, heads that are counted, and a width that is read from the input."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x).reshape(rows, length, 3, self.num_heads, self.head_dim)
        mixed = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        y: Tensor = self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return y


# Models of transformers.

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 13, "max_position_embeddings": 16}
GROUPED = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
STILL = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
"""Without dropout, whose numbers would not be those of one process."""
BERT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
OPT = {"ffn_dim": 24, "dropout": 0.0, "word_embed_proj_dim": 16}
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Llama with one table": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),  # biases of queries, keys and values
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 4}),  # norms of each head
    "GPT-2": ("GPT2LMHeadModel", {**GPT2, **STILL}),
    "BERT": ("BertForMaskedLM", {**TEXT, **BERT}),
    "BERT of 3 heads": ("BertForMaskedLM", {**TEXT, "hidden_size": 12, "num_attention_heads": 3, **BERT}),
    "ViT": ("ViTForImageClassification", {**SIZES, **BERT, "image_size": 8, "patch_size": 4}),
    "Mistral": ("MistralForCausalLM", GROUPED),
    "Phi-3": ("Phi3ForCausalLM", GROUPED),  # gathers the features of its fused matrices
    "Olmo 2": ("Olmo2ForCausalLM", GROUPED),  # norms over all heads
    "GPT-NeoX": ("GPTNeoXForCausalLM", GROUPED),  # queries, keys and values of one head after another
    "OPT": ("OPTForCausalLM", {**TEXT, **OPT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}),
}


def hugging_face(name: str, seed: int | None = None, exact: bool = True, **changes: Any) -> Any:
    """A model of transformers. exact: its norms and its loss are not rounded to float32.

    seed: None draws from torch's state. changes: of the configuration's fields; `config` gives one.
    """
    transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
    kind, options = HUGGING_FACE[name]
    made = getattr(transformers, kind)
    if seed is not None:
        torch.manual_seed(seed)
    model = made(changes.get("config") or made.config_class(**{**options, **changes})).double()
    for path, part in [*model.named_modules()] if exact else []:
        if type(part).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(part.weight.shape, eps=part.variance_epsilon, dtype=torch.float64)
            model.set_submodule(path, norm)
    if exact and kind.endswith(("CausalLM", "LMHeadModel")):
        model.loss_function = next_token
    return model


def next_token(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The loss of the next token as transformers computes it, but without rounding to float32."""
    return functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


class Logits(nn.Module):
    """A model of transformers that gives its logits alone."""

    def __init__(self, name: str, seed: int, **changes: Any) -> None:
        super().__init__()
        self.inner = hugging_face(name, seed, **changes)

    def forward(self, x: Tensor) -> Tensor:  # (B, T) or images -> (B, T, V) or (B, classes)
        logits: Tensor = self.inner(x).logits
        return logits
