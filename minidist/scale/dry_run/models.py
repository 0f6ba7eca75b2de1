"""Models for a dry run, by their shapes: the GPT of this project, and a BERT, which is here for this alone.

A model is made on the meta device and given tensors without data in place of its parameters, so that to the
rest of the code it looks like one that was made with memory.

Source of the BERT: Devlin et al. 2018, section 3: norms behind each residual step, and a pooler; or, named
"-mlm", the head that scores each token of the vocabulary by the tied matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model.configs import BERTConfig, GPTConfig, TransformerConfig
from minidist.model.gpt import GPT, Attention, FeedForward, UninitializedEmbedding, UninitializedLinear
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.engine import Loss
from minidist.scale.dry_run.fake_tensors import DryTensors


def build(shape: TransformerConfig, tensors: DryTensors) -> nn.Module:
    """The model of a shape, whole, as each rank of a training has it at first."""
    model = GPT(shape, device="meta") if isinstance(shape, GPTConfig) else BERT(shape)
    made: dict[int, nn.Parameter] = {}  # a tied one stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = tensors.empty(parameter.shape, parameter.dtype)
                made.setdefault(id(parameter), nn.Parameter(empty))
                module._parameters[name] = made[id(parameter)]
    return model


def plan_of(shape: TransformerConfig, tp: int) -> dict[str, str] | None:
    """How tensor parallelism cuts it; None for what the model says itself."""
    if tp == 1 or isinstance(shape, GPTConfig):
        return None
    plan = {
        "layers.0.token": "vocabulary",
        "layers.*.attention.query|key|value": "column",
        "layers.*.attention.output": "row",
        "layers.*.mlp.up": "column",
        "layers.*.mlp.down": "row",
    }
    return {**plan, f"layers.{shape.layers + 1}.scores": "vocabulary"} if shape.generates else plan


def loss_of(shape: TransformerConfig) -> Loss:
    """Of tokens, where there are scores for them; of a pooler the mean of what it gives."""
    return cross_entropy if shape.generates else _mean


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.float().mean()


def _attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """To all tokens of a row, before and behind."""
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)


class BERT(nn.Module):
    """A chain of layers, on the meta device: tokens (B, T) -> (B, T, V), or of the pooler (B, D)."""

    def __init__(self, shape: TransformerConfig) -> None:
        super().__init__()
        assert isinstance(shape, BERTConfig)
        with torch.device("meta"):
            first, last = _Embedding(shape), _Head(shape)
            self.layers = nn.ModuleList([first, *(_BertBlock(shape) for _ in range(shape.layers)), last])
        if last.scores is not None:
            last.scores.weight = first.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The layers in order."""
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return x


class _Embedding(nn.Module):
    def __init__(self, shape: BERTConfig) -> None:
        super().__init__()
        self.token = UninitializedEmbedding(shape.vocabulary, shape.width)
        self.position = UninitializedEmbedding(shape.context, shape.width)
        self.segment = UninitializedEmbedding(shape.segments, shape.width)
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        positions = self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x: Tensor = self.norm(self.token(tokens) + positions + self.segment.weight[0])
        return x


class _BertBlock(nn.Module):
    def __init__(self, shape: BERTConfig) -> None:
        super().__init__()
        # A GPT's parts take what they need of a shape: width, heads, and what is dropped.
        sizes = GPTConfig(
            vocabulary=shape.vocabulary,
            context=shape.context,
            layers=shape.layers,
            heads=shape.heads,
            width=shape.width,
        )
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
        self.map = UninitializedLinear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width) if shape.generates else None
        self.scores = UninitializedLinear(shape.width, shape.vocabulary) if shape.generates else None

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, V), or (B, D)
        if self.norm is None or self.scores is None:
            return torch.tanh(self.map(x[:, 0]))
        scores: Tensor = self.scores(self.norm(functional.gelu(self.map(x))))
        return scores
