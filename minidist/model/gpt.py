"""A GPT on bytes, with GPT-2's shape: a chain of layers, `model.layers`, which a pipeline cuts anywhere.

It is seeded by layer (see seeding.py): `gpt_layers(config, 3, 4)` builds the third block alone, with the
weights that it has in the whole model. The layers themselves are in blocks.py. Shapes: B batch, T tokens in a
row, V vocabulary.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3 (residual
projections scaled by 1/sqrt(2 layers)); the tied output matrix: Press and Wolf 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minidist.kernels.attention_rung import AttentionRung
from minidist.model.attention import Attend, named
from minidist.model.blocks import Attention as Attention
from minidist.model.blocks import Block, Embedding, Head
from minidist.model.blocks import FeedForward as FeedForward
from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.seeding import fill, own_parameters, undrawn

Device = torch.device | str | None


def gpt_layers(
    config: TransformerConfig,
    start: int = 0,
    stop: int | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: Device = None,
    attention: AttentionRung | str | None = None,
) -> list[nn.Module]:
    """Return layers start to stop of a GPT, without stop, with the weights that they have in the whole model.

    Layer 0 is the embedding, 1 to config.layers are the blocks, config.layers + 1 is the head. If config.tied
    and both ends are among the layers, they share one parameter. A head built without the embedding starts
    with an equal copy; its stage and the embedding's then have to sum the gradient. dtype, device: torch's
    defaults unless given; "meta" allocates nothing. attention: a rung of attention for the blocks, or its
    name, such as "s6_causal"; None for torch's. Raises TypeError if config is not a GPTConfig, ValueError if
    the range is empty or out of bounds, for an unknown rung, and for a rung with dropout.
    """
    if not isinstance(config, GPTConfig):
        raise TypeError(f"config is a {type(config).__name__}, which cannot be built; give a GPTConfig")
    last = config.layers + 1
    stop = last + 1 if stop is None else stop
    if not 0 <= start < stop <= last + 1:
        raise ValueError(f"layers are {start} to {stop}; give 0 <= start < stop <= {last + 1}")
    indices = range(start, stop)
    stage = undrawn(lambda: nn.ModuleDict({str(i): _layer(config, i) for i in indices}), dtype, device)
    layers = list(stage.values())
    if config.tied and isinstance(layers[0], Embedding) and isinstance(layers[-1], Head):
        layers[-1].output.weight = layers[0].token.weight
    if attention is not None:
        rung = named(attention) if isinstance(attention, str) else attention
        for block in layers:
            if isinstance(block, Block):
                block.attention.attend = Attend(rung, config.dropout)
    _fill_gpt(((f"layers.{name}", p) for name, p in stage.named_parameters()), config, seed)
    return layers


def _fill_gpt(parameters: Iterable[tuple[str, Tensor]], config: GPTConfig, seed: int) -> None:
    """Give parameters of a GPT their first values, by their names in the whole model."""
    last = f"layers.{config.layers + 1}.output.weight"
    renamed = {last: "layers.0.token.weight"} if config.tied else {}

    def deviation(name: str, _: Tensor) -> float:
        # Each block adds twice to the stream; this scale keeps the sum's variance from growing with layers.
        residual = name.endswith(("attention.output.weight", "mlp.down.weight", "mlp.experts.down"))
        return 0.02 / math.sqrt(2 * config.layers) if residual else 0.02

    fill(((renamed.get(name, name), parameter) for name, parameter in parameters), deviation, seed=seed)


def _layer(config: GPTConfig, index: int) -> nn.Module:
    if index == 0:
        return Embedding(config)
    return Block(config) if index <= config.layers else Head(config)


class GPT(nn.Module):
    """A GPT with GPT-2's shape: integer tokens (B, T) -> logits (B, T, V).

    Weights are drawn from N(0, 0.02^2), projections onto the residual stream with deviation 0.02 / sqrt(2
    layers). See `gpt_layers` for dtype, device, attention and errors.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: Device = None,
        attention: AttentionRung | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        layers = gpt_layers(config, seed=seed, dtype=dtype, device=device, attention=attention)
        self.layers = nn.ModuleList(layers)

    def initialize_part(self, part: nn.Module) -> None:
        """Fill a submodule's own tensors, for a model made on "meta" that gets memory part by part."""
        assert isinstance(self.config, GPTConfig)
        _fill_gpt(own_parameters(self, part), self.config, self.seed)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) integers -> (B, T, V)
        """Run the layers in order."""
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return x
