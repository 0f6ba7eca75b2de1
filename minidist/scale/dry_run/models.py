"""Models for a dry run: minidist's GPT and BERT, or your own.

A model is built on the meta device, then its parameters are replaced by tensors without data. To the rest of
the code it looks like an ordinary model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minidist.model.bert import BERT
from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.model.gpt import GPT
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.pipeline.model_stage import ModelStage
from minidist.parallel.training.precision import DTYPES, Precision
from minidist.scale.dry_run.fake_tensors import DryTensors
from minidist.scale.dry_run.own_model import OwnModel
from minidist.scale.dry_run.peers import Form


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


def example_of(shape: TransformerConfig | OwnModel, layout: Layout) -> Any:
    """The example with which `prepare` finds the layers of a model of your own; None if it needs nothing."""
    return shape.batch(1)[0] if isinstance(shape, OwnModel) and layout.pp > 1 else None


def sent_to(
    shape: TransformerConfig | OwnModel,
    engine: Engine,
    tokens: int,
    tensors: DryTensors,
    chunk: int,
    rows: int,
) -> list[Form]:
    """The tensors that the stage before sends to an engine's chunk, for a micro-batch of so many rows."""
    layout = engine.layout
    if not isinstance(shape, OwnModel):
        outside = tokens // layout.tp if layout.sequence_parallel else tokens
        return [((rows, outside, shape.width), DTYPES.get(layout.precision, torch.float32))]
    # Run the uncut model up to the chunk's first layer.
    model, stage, precision = shape.dry(tensors), engine.part.stages[chunk], Precision(layout.precision, None)
    precision.convert(model)
    inputs = shape.batch(rows, tensors)[0]
    inputs = precision.inputs(engine.executor.own_tokens(inputs, inputs)[0])
    with torch.no_grad():
        if isinstance(stage, ModelStage):
            sent = ModelStage(model, stage.trace, range(stage.layers.start))((), inputs)
        else:
            first: Any = next(stage.children())
            start = [*engine.model.get_submodule("layers").children()].index(first)
            before: Any = model.get_submodule("layers")
            sent = [nn.Sequential(*before[:start])(inputs)]
    return [(tuple(x.shape), x.dtype) for x in sent]


def loss_of(shape: TransformerConfig | OwnModel) -> Loss:
    """Cross entropy for a model with scores; for a pooler the mean of its output; or your own."""
    if isinstance(shape, OwnModel):
        return shape.loss
    return cross_entropy if shape.generates else _mean


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.float().mean()
