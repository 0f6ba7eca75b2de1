"""A GPT on bytes, with GPT-2's shape: a chain of layers, `model.layers`, which a pipeline cuts anywhere.

It is seeded by layer (see seeding.py): `gpt_layers(config, 3, 4)` builds the third block alone, with the
weights that it has in the whole model. Shapes: B batch, T tokens in a row, D width, H heads, V vocabulary.

Sources: Radford et al. 2019, section 2.3 (norms before each part and one at the end, residual projections
scaled by 1/sqrt(2 layers)); the tied output matrix: Press and Wolf 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.seeding import fill, own_parameters

Device = torch.device | str | None


class Embedding(nn.Module):
    """The first layer of a GPT: adds a learned vector for the token and one for its position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.positions: Callable[[Tensor], Tensor] | None = None  # from tokens (B, T); None for 0 to T - 1

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) integers -> (B, T, D)
        """Raises ValueError if tokens are not (B, T), or T is more than the context."""
        context = self.position.num_embeddings
        if tokens.dim() != 2 or tokens.shape[1] > context:
            raise ValueError(f"tokens are {tuple(tokens.shape)}; give (B, T) with T at most {context}")
        if self.positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            positions = self.positions(tokens)
        x: Tensor = self.dropout(self.token(tokens) + self.position(positions))
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
        self.mlp = FeedForward(config)
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


def gpt_layers(
    config: TransformerConfig,
    start: int = 0,
    stop: int | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> list[nn.Module]:
    """Return layers start to stop of a GPT, without stop, with the weights that they have in the whole model.

    Layer 0 is the embedding, 1 to config.layers are the blocks, config.layers + 1 is the head. If config.tied
    and both ends are among the layers, they share one parameter. A head built without the embedding starts
    with an equal copy; its stage and the embedding's then have to sum the gradient. dtype, device: torch's
    defaults unless given; "meta" allocates nothing. Raises TypeError if config is not a GPTConfig, ValueError
    if the range is empty or out of bounds.
    """
    if not isinstance(config, GPTConfig):
        raise TypeError(f"config is a {type(config).__name__}, which cannot be built; give a GPTConfig")
    last = config.layers + 1
    stop = last + 1 if stop is None else stop
    if not 0 <= start < stop <= last + 1:
        raise ValueError(f"layers are {start} to {stop}; give 0 <= start < stop <= {last + 1}")
    with torch.device("meta"):  # where layers draw no weights of their own
        stage = nn.ModuleDict({str(index): _layer(config, index) for index in range(start, stop)})
    stage.to(dtype=dtype or torch.get_default_dtype())
    stage.to_empty(device=device or torch.get_default_device())
    layers = list(stage.values())
    if config.tied and isinstance(layers[0], Embedding) and isinstance(layers[-1], Head):
        layers[-1].output.weight = layers[0].token.weight
    _fill_gpt(((f"layers.{name}", p) for name, p in stage.named_parameters()), config, seed)
    return layers


def _fill_gpt(parameters: Iterable[tuple[str, Tensor]], config: GPTConfig, seed: int) -> None:
    """Give parameters of a GPT their first values, by their names in the whole model."""
    last = f"layers.{config.layers + 1}.output.weight"
    renamed = {last: "layers.0.token.weight"} if config.tied else {}

    def deviation(name: str, _: Tensor) -> float:
        # Each block adds twice to the stream; this scale keeps the sum's variance from growing with layers.
        residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        return 0.02 / math.sqrt(2 * config.layers) if residual else 0.02

    fill(((renamed.get(name, name), parameter) for name, parameter in parameters), deviation, seed=seed)


def _layer(config: GPTConfig, index: int) -> nn.Module:
    if index == 0:
        return Embedding(config)
    return Block(config) if index <= config.layers else Head(config)


class GPT(nn.Module):
    """A GPT with GPT-2's shape: integer tokens (B, T) -> logits (B, T, V).

    Weights are drawn from N(0, 0.02^2), projections onto the residual stream with deviation 0.02 / sqrt(2
    layers). See `gpt_layers` for dtype, device and errors.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.layers = nn.ModuleList(gpt_layers(config, seed=seed, dtype=dtype, device=device))

    def initialize_part(self, part: nn.Module) -> None:
        """Fill a submodule's own parameters, for a model made on "meta" that gets memory part by part."""
        assert isinstance(self.config, GPTConfig)
        _fill_gpt(own_parameters(self, part), self.config, self.seed)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) integers -> (B, T, V)
        """Run the layers in order."""
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return x
