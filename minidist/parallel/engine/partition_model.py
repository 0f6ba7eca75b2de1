"""Reduce a model to this rank's part: its tokens, its parts of matrices, its layers.

Every rank builds the whole model, possibly on the meta device, and rank 0's weights go to all. Then context
parallelism makes attention and positions work on the rank's tokens, tensor parallelism cuts matrices, and a
pipeline removes the layers of other stages. Names stay those of the whole model.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 3, on combining the three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.mesh import Mesh
from minidist.parallel.context import sequence_share
from minidist.parallel.context.sequence_share import SequenceShare
from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.meta_device import Initialize, Skeleton
from minidist.parallel.engine.parameter_placement import Placement, Whole
from minidist.parallel.engine.step_executor import RankModel, Tied
from minidist.parallel.flat.joined_messages import broadcast_together, require_same
from minidist.parallel.pipeline.layer_by_layer import cut
from minidist.parallel.pipeline.layer_chain import check_layers
from minidist.parallel.sharding.elementwise_optimizers import is_elementwise
from minidist.parallel.tensor.cuts import cuts
from minidist.parallel.tensor.parallelize import parallelize
from minidist.parallel.tensor.plans import plan_for
from minidist.parallel.tensor.vocabulary import vocabulary_of


class RemoteLayer(nn.Module):
    """Stands for a layer that another stage of the pipeline holds."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        """Raise RuntimeError, since the layer is on another rank."""
        raise RuntimeError(
            f"this layer is on stage {self.stage} of the pipeline; call engine.step or engine.evaluate, "
            "which go through all stages"
        )

    def extra_repr(self) -> str:
        """Show the stage when the layer is printed."""
        return f"stage {self.stage}"


def partition_model(
    model: nn.Module,
    layout: Layout,
    mesh: Mesh,
    plan: Mapping[str, str] | None = None,
    initialize: Initialize | None = None,
) -> RankModel:
    """Reduce `model` in place to this rank's part; a collective.

    Broadcasts the model over pp if layers are cut, and over tp if matrices are. Together with what the
    strategies send over dp and cp, rank 0's weights reach all ranks. Tensors on the meta device get memory
    and values after the model is cut (meta_device.py).

    plan: how tp cuts each module; None for `plan_for(model)`. A ValueError names the axis by which the model
    cannot be partitioned.
    """
    if plan is not None and layout.tp == 1:
        raise ValueError("plan is given and the layout has tp=1, which cuts nothing; leave one of them out")
    if layout.pp > 1:
        check_layers(model, layout)
    skeleton = None
    if layout.tp * layout.pp > 1:
        state = [*model.named_parameters(), *model.named_buffers()]
        require_same("parameters and buffers", state, None)
        if layout.pp > 1:
            broadcast_together([tensor for _, tensor in state if not tensor.is_meta], mesh.group("pp"))
        if any(tensor.is_meta for _, tensor in state):
            skeleton = Skeleton(model, initialize)
    whole = Whole(model)
    share = None
    if layout.cp > 1:
        share = SequenceShare(mesh.group("cp"))
        sequence_share.apply(model, share)
    if layout.tp > 1:
        parallelize(
            model, plan_for(model) if plan is None else plan, mesh.group("tp"), layout.sequence_parallel
        )
    vocabulary = vocabulary_of(model)
    stages, stage_of = _take_layers(model, layout, mesh.rank("pp"), whole) if layout.pp > 1 else ((), {})
    placement = Placement(mesh, whole, model, cuts(model), stage_of)
    if skeleton is not None:
        skeleton.fill(model, placement.cuts)
        placement.device = skeleton.device
    return RankModel(
        model, mesh, placement, share, stages, _tied(model, whole, stage_of, mesh.rank("pp")), vocabulary
    )


def _take_layers(
    model: nn.Module, layout: Layout, own: int, whole: Whole
) -> tuple[tuple[nn.Module, ...], dict[str, int]]:
    """Keep only this stage's layers; returns them chunk by chunk, and the stage of each tensor by name."""
    layers: Any = model.layers
    parts = layout.pp * layout.chunks
    number_of = {name: number for number, name in enumerate(layers._modules)}
    # With the sizes of whole layers, the cut is the same on all ranks that share a layer.
    sizes = [0] * len(layers)
    for name in whole.first:
        sizes[number_of[name.split(".")[1]]] += whole.tensors[name].numel()
    found = cut([*layers], parts, weights=sizes)
    stage_of_layer = {i: part % layout.pp for part, layers_of in enumerate(found) for i in layers_of}
    mine = [layers_of for part, layers_of in enumerate(found) if part % layout.pp == own]
    stages = tuple(nn.Sequential(*(layers[i] for i in layers_of)) for layers_of in mine)
    for i, stage in stage_of_layer.items():
        if stage != own:
            layers[i] = RemoteLayer(stage)
    return stages, {name: stage_of_layer[number_of[name.split(".")[1]]] for name in whole.tensors}


def _tied(model: nn.Module, whole: Whole, stage_of: Mapping[str, int], own: int) -> tuple[Tied, ...]:
    """The trained parameters that have names on several stages, in the same order on all ranks."""
    stages: dict[str, dict[int, str]] = {}
    for name, first in whole.first.items():
        stages.setdefault(first, {}).setdefault(stage_of.get(name, 0), name)
    return tuple(
        Tied(names.get(own), tuple(sorted(names)))
        for first, names in stages.items()
        if len(names) > 1 and whole.tensors[first].requires_grad
    )


def checked(optimizer: MakeOptimizer, layout: Layout) -> MakeOptimizer:
    """Wrap an optimizer function: refuse an optimizer that cannot train a part of a model."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = [*parameters]
        try:
            made = optimizer(given)
        except ValueError:
            if given:
                raise
            # A stage may have no weights: torch refuses an empty list, but takes a group without parameters.
            nothing: Any = [{"params": []}]
            made = optimizer(nothing)
        name = type(made).__name__
        if layout.tp > 1 and isinstance(made, torch.optim.Optimizer) and not is_elementwise(type(made)):
            raise ValueError(
                f"optimizer is {name}, which needs whole parameters, and the layout has tp={layout.tp}, "
                "which cuts them; use an elementwise one, such as torch.optim.AdamW, or dp or pp instead"
            )
        if layout.pp > 1 and isinstance(made, torch.optim.LBFGS):
            raise ValueError(
                f"optimizer is {name}, whose steps look at all parameters at once, and the layout has "
                f"pp={layout.pp}, where each stage has its own; use another, such as torch.optim.AdamW"
            )
        return made

    return make
