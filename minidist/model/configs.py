"""The shapes of transformers, by name: layers, heads and parameter counts, without building anything.

`config("gpt2-small")` is a shape to build (`GPT(config("byte-tiny"))`) or to calculate memory, FLOPs and
communication from. BERT's shapes are only for calculating.

Sources: GPT-2, Radford et al. 2019, table 2; GPT-3, Brown et al. 2020, table 2.1 (which gives the 13 B model
a width of 5140; its 40 heads of 128 make 5120); BERT, Devlin et al. 2018, section 3; BERT tiny to medium,
Turc et al. 2019, table 1, with heads of 64 as in BERT base. With experts: Mixtral, Jiang et al. 2024, table 1
(inner width 14,336); Qwen3, Yang et al. 2025, table 2, and its published configuration (inner width 768).
Their experts have three matrices and a GPT's two, so here they are half as wide again, with as many
parameters; each key head serves several query heads there and one here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

from minidist._arguments import check_whole
from minidist._names import unknown


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ABC):
    """The sizes that GPT and BERT share: embeddings, then blocks of attention and an MLP four times as wide.

    Raises TypeError or ValueError for a size that is not a positive integer, ValueError if heads do not
    divide width.
    """

    vocabulary: int  # V: how many tokens the model knows
    context: int  # most tokens in a sequence
    layers: int  # blocks
    heads: int  # H: attention heads in a block
    width: int  # D: features of a token

    def __post_init__(self) -> None:
        for size in ("vocabulary", "context", "layers", "heads", "width"):
            check_whole(size, getattr(self, size), 1)
        if self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide width ({self.width}); change one of them")

    @property
    def head_size(self) -> int:
        """Features of one attention head: width / heads."""
        return self.width // self.heads

    @property
    def middle(self) -> int:
        """F: features inside an MLP."""
        return 4 * self.width

    @property
    def experts(self) -> int:
        """E: MLPs in a block, of which each token takes some; 0 for one that all tokens take."""
        return 0

    def rows_of_mlps(self, tokens: int) -> int:
        """How many rows the MLPs of a block have for so many tokens, if all experts get as many."""
        return tokens

    @property
    def generates(self) -> bool:
        """Whether the model ends in a score for each token of the vocabulary."""
        return True

    @property
    def shares_matrix(self) -> bool:
        """Whether the output matrix is the token embedding."""
        return True

    def block_parameters(self) -> int:
        """Parameters of one block: 12 D^2 in six matrices, 9 D in their biases, 4 D in two norms."""
        return 12 * self.width**2 + 13 * self.width

    @abstractmethod
    def parameters(self) -> int:
        """Parameters of the whole model, counting a tied matrix once."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT (Radford et al. 2019). By default the vocabulary is one token for each byte."""

    vocabulary: int = 256
    tied: bool = True  # the output matrix is the token embedding
    dropout: float = 0.0  # share of activations dropped while training
    experts: int = 0  # MLPs in a block, of which a router picks some for each token; 0 for one and no router
    experts_per_token: int = 2  # k: how many it picks
    expert_width: int = 0  # features inside an expert; 0 for four times the width
    capacity: float | None = None  # an expert takes at most this times the mean number of tokens
    balance_rate: float = 0.0  # how far a step moves the bias that balances the experts' load; 0 for no bias

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("experts", self.experts, 0)
        if self.experts:
            check_whole("experts_per_token", self.experts_per_token, 1)
            if self.experts_per_token > self.experts:
                raise ValueError(
                    f"experts_per_token is {self.experts_per_token}, but a block has {self.experts} experts; "
                    "give as many at most"
                )
        check_whole("expert_width", self.expert_width, 0)
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity is {self.capacity}; give a positive factor, or None for no limit")
        if not self.balance_rate >= 0:
            raise ValueError(f"balance_rate is {self.balance_rate}; give at least 0")
        for name in ("expert_width", "capacity", "balance_rate"):
            if getattr(self, name) and not self.experts:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but there are no experts; give some, or leave it out"
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; give at least 0 and less than 1")

    @property
    def shares_matrix(self) -> bool:
        """Whether the output matrix is the token embedding."""
        return self.tied

    @property
    def middle(self) -> int:
        """Features inside an MLP."""
        return self.expert_width or super().middle

    def rows_of_mlps(self, tokens: int) -> int:
        """One for each pair of a token and an expert, as far as the experts' capacity goes."""
        if not self.experts:
            return tokens
        pairs = self.experts_per_token * tokens
        if self.capacity is None:
            return pairs
        return min(pairs, self.experts * math.ceil(self.capacity * pairs / self.experts))

    def block_parameters(self) -> int:
        """As for one MLP, which E experts of 2 D F (without biases) and a router of E D replace."""
        mlp = 8 * self.width**2 + 5 * self.width
        experts = self.experts * self.width * (2 * self.middle + 1)
        return super().block_parameters() + (experts - mlp if self.experts else 0)

    def parameters(self) -> int:
        """(V + context) D in embeddings, the blocks, 2 D in the last norm, and V D more if not tied."""
        matrices = self.vocabulary if self.tied else 2 * self.vocabulary
        return (matrices + self.context + 2) * self.width + self.layers * self.block_parameters()


@dataclass(frozen=True, kw_only=True)
class BERTConfig(TransformerConfig):
    """The shape of a BERT (Devlin et al. 2018). Raises ValueError for an unknown head."""

    vocabulary: int = 30522
    context: int = 512
    segments: int = 2  # a token belongs to the first sentence or to the second
    head: str = "pooler"  # reads the first token; "masked_lm" scores each token, with a tied matrix

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head not in ("pooler", "masked_lm"):
            raise unknown("head of a BERT", self.head, ("pooler", "masked_lm"))

    @property
    def generates(self) -> bool:
        """Whether the model ends in a score for each token of the vocabulary."""
        return self.head == "masked_lm"

    @property
    def shares_matrix(self) -> bool:
        """Whether the output matrix is the token embedding."""
        return self.generates

    def parameters(self) -> int:
        """(V + context + segments) D in embeddings, 2 D in their norm, the blocks, D^2 + D in the head's map.

        The masked_lm head has 2 D more in a norm, and V in the scores' bias.
        """
        embeddings = (self.vocabulary + self.context + self.segments + 2) * self.width
        scores = 2 * self.width + self.vocabulary if self.generates else 0
        return embeddings + self.layers * self.block_parameters() + self.width**2 + self.width + scores


def _gpt(layers: int, heads: int, width: int, context: int = 1024) -> GPTConfig:
    return GPTConfig(vocabulary=50257, context=context, layers=layers, heads=heads, width=width)


def _mixture(shape: GPTConfig, vocabulary: int, experts: int, each: int, inner: int) -> GPTConfig:
    return replace(
        shape,
        vocabulary=vocabulary,
        tied=False,
        experts=experts,
        experts_per_token=each,
        expert_width=3 * inner // 2,
    )


_BERT = {
    "bert-tiny": BERTConfig(layers=2, heads=2, width=128),
    "bert-mini": BERTConfig(layers=4, heads=4, width=256),
    "bert-small": BERTConfig(layers=4, heads=8, width=512),
    "bert-medium": BERTConfig(layers=8, heads=8, width=512),
    "bert-base": BERTConfig(layers=12, heads=12, width=768),
    "bert-large": BERTConfig(layers=24, heads=16, width=1024),
}
CONFIGS: dict[str, TransformerConfig] = {
    "byte-tiny": GPTConfig(context=64, layers=2, heads=4, width=64),  # learns within seconds on one core
    "byte-small": GPTConfig(context=128, layers=4, heads=4, width=256),  # the benchmarks train this one
    "gpt2-small": _gpt(layers=12, heads=12, width=768),
    "gpt2-medium": _gpt(layers=24, heads=16, width=1024),
    "gpt2-large": _gpt(layers=36, heads=20, width=1280),
    "gpt2-xl": _gpt(layers=48, heads=25, width=1600),
    "gpt3-2.7b": _gpt(layers=32, heads=32, width=2560, context=2048),
    "gpt3-6.7b": _gpt(layers=32, heads=32, width=4096, context=2048),
    "gpt3-13b": _gpt(layers=40, heads=40, width=5120, context=2048),
    "gpt3-175b": _gpt(layers=96, heads=96, width=12288, context=2048),
    "mixtral-8x7b": _mixture(
        _gpt(layers=32, heads=32, width=4096, context=32768), 32000, experts=8, each=2, inner=14336
    ),
    "qwen3-30b-a3b": _mixture(
        _gpt(layers=48, heads=32, width=2048, context=32768), 151936, experts=128, each=8, inner=768
    ),
    **_BERT,
    **{f"{name}-mlm": replace(shape, head="masked_lm") for name, shape in _BERT.items()},
}


def config(name: str, **changes: Any) -> TransformerConfig:
    """Return the shape of that name, with fields changed: `config("gpt2-small", vocabulary=256, layers=6)`.

    Raises ValueError for an unknown name or field, with the nearest known one, and for an impossible shape.
    """
    if name not in CONFIGS:
        raise unknown("model", name, CONFIGS)
    shape = CONFIGS[name]
    known = [field.name for field in fields(shape)]
    for field in changes:
        if field not in known:
            raise unknown(f"field of {name}", field, known)
    return replace(shape, **changes)
