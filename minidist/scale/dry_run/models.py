"""Models for a dry run: minidist's GPT and BERT, or your own.

A model is built on the meta device, then its parameters are replaced by tensors without data. To the rest of
the code it looks like an ordinary model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minidist.model.bert import BERT
from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.gpt import GPT
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.engine import Loss
from minidist.scale.dry_run.fake_tensors import DryTensors
from minidist.scale.dry_run.own_model import OwnModel


def build(shape: TransformerConfig | OwnModel, tensors: DryTensors) -> nn.Module:
    """Build the whole model of a shape, or of your own, as each rank of a training does."""
    if isinstance(shape, OwnModel):
        return shape.dry(tensors)
    model = GPT(shape, device="meta") if isinstance(shape, GPTConfig) else BERT(shape, device="meta")
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


def loss_of(shape: TransformerConfig | OwnModel) -> Loss:
    """Cross entropy for a model with scores; for a pooler the mean of its output; or your own."""
    if isinstance(shape, OwnModel):
        return shape.loss
    return cross_entropy if shape.generates else _mean


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.float().mean()
