"""A BERT: a chain of layers, `model.layers`, in which each token sees all tokens of its row.

A norm follows each residual sum. The head is a pooler, which reads the first token, or scores each token of
the vocabulary with the tied matrix, to guess masked tokens (data.py hides them). There are no sentence pairs:
every token belongs to the first segment. Shapes: B rows, T tokens in a row, D width, V vocabulary.

Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers", section 3 and appendix A.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model.blocks import Attention, FeedForward
from minidist.model.configs import BERTConfig, GPTConfig, TransformerConfig
from minidist.model.seeding import fill, own_parameters, undrawn


class BERT(nn.Module):
    """Integer tokens (B, T) -> scores (B, T, V), or the pooler's (B, D).

    Seeded by name, as the GPT is; matrices are drawn from N(0, 0.02^2). dtype, device: torch's defaults
    unless given; "meta" allocates nothing. Raises TypeError if config is not a BERTConfig.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, BERTConfig):
            raise TypeError(f"config is a {type(config).__name__}; give a BERTConfig")
        self.config, self.seed = config, seed
        self.layers = undrawn(lambda: nn.ModuleList(_layers(config)), dtype, device)
        first, *_, last = self.layers
        assert isinstance(first, _Embedding)
        assert isinstance(last, _Head)
        if last.scores is not None:
            last.scores.weight = first.token.weight
        self._fill(self.named_parameters())

    def initialize_part(self, part: nn.Module) -> None:
        """Fill a submodule's own parameters, for a model made on "meta" that gets memory part by part."""
        self._fill(own_parameters(self, part))

    def _fill(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        tied = {f"layers.{len(self.layers) - 1}.scores.weight": "layers.0.token.weight"}
        fill(((tied.get(name, name), p) for name, p in parameters), lambda *_: 0.02, seed=self.seed)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) integers -> (B, T, V), or (B, D)
        """Run the layers in order."""
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return x


def _layers(config: BERTConfig) -> Iterator[nn.Module]:
    yield _Embedding(config)
    yield from (_Block(config) for _ in range(config.layers))
    yield _Head(config)


def _attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Attention to all tokens of a row."""
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)


class _Embedding(nn.Module):
    def __init__(self, shape: BERTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.segment = nn.Embedding(shape.segments, shape.width)
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        positions = self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x: Tensor = self.norm(self.token(tokens) + positions + self.segment.weight[0])
        return x


class _Block(nn.Module):
    def __init__(self, shape: BERTConfig) -> None:
        super().__init__()
        sizes = GPTConfig(context=shape.context, layers=shape.layers, heads=shape.heads, width=shape.width)
        self.attention, self.mlp = Attention(sizes), FeedForward(sizes)
        self.attention.attend = _attend
        self.attention_norm, self.mlp_norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        x = self.attention_norm(x + self.attention(x))
        x = self.mlp_norm(x + self.mlp(x))
        return x


class _Head(nn.Module):
    def __init__(self, shape: BERTConfig) -> None:
        super().__init__()
        self.map = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width) if shape.generates else None
        self.scores = nn.Linear(shape.width, shape.vocabulary) if shape.generates else None

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, V), or (B, D)
        if self.norm is None or self.scores is None:
            return torch.tanh(self.map(x[:, 0]))
        scores: Tensor = self.scores(self.norm(functional.gelu(self.map(x))))
        return scores
