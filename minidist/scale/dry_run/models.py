"""Models for a dry run: minidist's GPT, and a BERT that exists only for this purpose.

A model is built on the meta device, then its parameters are replaced by tensors without data. To the rest of
the code it looks like an ordinary model.

Source of the BERT: Devlin et al. 2018, section 3: a norm after each residual sum, and a pooler; the "-mlm"
variants have a head that scores each token of the vocabulary with the tied matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model.configs import BERTConfig, GPTConfig, TransformerConfig
from minidist.model.gpt import GPT, Attention, FeedForward
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.engine import Loss
from minidist.scale.dry_run.fake_tensors import DryTensors
from minidist.scale.dry_run.own_model import OwnModel


def build(shape: TransformerConfig | OwnModel, tensors: DryTensors) -> nn.Module:
    """Build the whole model of a shape, or of your own, as each rank of a training does."""
    if isinstance(shape, OwnModel):
        return shape.dry(tensors)
    model = GPT(shape, device="meta") if isinstance(shape, GPTConfig) else BERT(shape)
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one parameter
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = tensors.empty(parameter.shape, parameter.dtype)
                made.setdefault(id(parameter), nn.Parameter(empty))
                module._parameters[name] = made[id(parameter)]
    return model


def batch_of(
    shape: TransformerConfig | OwnModel, rows: int, tokens: int, tensors: DryTensors
) -> tuple[Tensor, Tensor]:
    """A rank's inputs and targets."""
    if isinstance(shape, OwnModel):
        return shape.batch(rows, tensors)
    return tensors.empty((rows, tokens), torch.int64), tensors.empty((rows, tokens), torch.int64)


def plan_of(shape: TransformerConfig | OwnModel, tp: int) -> dict[str, str] | None:
    """The plan by which tensor parallelism cuts a BERT; None for a GPT, which has its own."""
    if tp == 1 or isinstance(shape, GPTConfig | OwnModel):
        return None
    plan = {
        "layers.0.token": "vocabulary",
        "layers.*.attention.query|key|value": "column",
        "layers.*.attention.output": "row",
        "layers.*.mlp.up": "column",
        "layers.*.mlp.down": "row",
    }
    return {**plan, f"layers.{shape.layers + 1}.scores": "vocabulary"} if shape.generates else plan


def loss_of(shape: TransformerConfig | OwnModel) -> Loss:
    """Cross entropy for a model with scores; for a pooler the mean of its output; or your own."""
    if isinstance(shape, OwnModel):
        return shape.loss
    return cross_entropy if shape.generates else _mean


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.float().mean()


def _attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Attention to all tokens of a row."""
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)


class BERT(nn.Module):
    """A BERT on the meta device: tokens (B, T) -> scores (B, T, V), or the pooler's (B, D)."""

    def __init__(self, shape: TransformerConfig) -> None:
        super().__init__()
        assert isinstance(shape, BERTConfig)
        with torch.device("meta"):
            first, last = _Embedding(shape), _Head(shape)
            self.layers = nn.ModuleList([first, *(_BertBlock(shape) for _ in range(shape.layers)), last])
        if last.scores is not None:
            last.scores.weight = first.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply the layers in order."""
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return x


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


class _BertBlock(nn.Module):
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
