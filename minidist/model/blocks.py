"""The layers of a GPT: an embedding, blocks of attention and an MLP, and a head.

Shapes: B batch, T tokens in a row, D width, H heads, V vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3 (norms before
each part and one at the end).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model.configs import GPTConfig
from minidist.model.mixture_of_experts import MixtureOfExperts


class Embedding(nn.Module):
    """The first layer of a GPT: adds a learned vector for the token and one for its position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.positions: Callable[[Tensor], Tensor] | None = None  # from tokens (B, T); None for 0 to T - 1

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) integers -> (B, T, D)
        """Raises ValueError for tokens that are not (B, T), too many for the context, or unknown."""
        context = self.position.num_embeddings
        if tokens.dim() != 2 or tokens.shape[1] > context:
            raise ValueError(f"tokens are {tuple(tokens.shape)}; give (B, T) with T at most {context}")
        own = self.positions
        positions = torch.arange(tokens.shape[1], device=tokens.device) if own is None else own(tokens)
        try:
            x: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        except IndexError as error:  # on the CPU; a GPU has no time to look
            raise ValueError(
                f"tokens are {tokens.min()} to {tokens.max()}; give 0 to {self.token.num_embeddings - 1}"
            ) from error
        return x


def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Causal attention, (B, H, T, D/H) each; position i sees the keys of positions 0 to i."""
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention: a token sees itself and those before it.

    The rows of each weight are in the order of the heads, so a cut by rows is a cut by heads. The number of
    heads follows from the width of what the maps return: given a rank's part of them, this layer attends with
    that rank's heads. `attend` can be replaced, for example where the sequence is cut.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)
        self.dropout = config.dropout
        self.attend: Callable[[Tensor, Tensor, Tensor, float], Tensor] = attend

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        """Split queries, keys and values into heads, attend, and map the result."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        mixed = self.attend(query, key, value, self.dropout if self.training else 0.0)
        x = self.output(mixed.transpose(1, 2).flatten(2))  # (B, T, H, D/H) -> (B, T, D)
        return x

    def _heads(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, H, T, D/H)
        return x.view(*x.shape[:2], x.shape[2] // self.head_size, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """The MLP of a block: four times as wide in the middle, with GPT-2's GELU (the tanh form)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        """Up, GELU, down."""
        x = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return x


class Block(nn.Module):
    """Attention, then an MLP; each reads a normed copy of the stream and adds to the stream itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MixtureOfExperts(config) if config.experts else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        """Two residual steps."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Head(nn.Module):
    """The last layer of a GPT: a norm, then a score for each token of the vocabulary."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, V)
        """Norm, then logits."""
        x = self.output(self.norm(x))
        return x
