"""Reduce a model to this rank's part: its tokens, its experts, its parts of matrices, its layers.

Every rank builds the whole model, possibly on the meta device, and gets rank 0's weights. Then context
parallelism makes attention and positions work on the rank's tokens, tensor parallelism cuts matrices, and a
pipeline removes the layers of other stages and the parameters that only they need. Names stay those of the
whole model.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 3, on combining the three.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.mesh import Mesh
from minidist.comm.work import Group
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import schedule_kind
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.engine.meta_device import Initialize, Skeleton
from minidist.parallel.engine.tensor_map import TensorMap, WholeModel
from minidist.parallel.experts.expert_parallel import share_experts
from minidist.parallel.flat.joined_messages import broadcast_together, require_same
from minidist.parallel.layerwise.layer_by_layer import cut
from minidist.parallel.pipeline.layer_chain import find_chain
from minidist.parallel.pipeline.model_stage import LayerTrace, ModelStage, drop_parameters
from minidist.parallel.sequence_share import sequence_share, transformers_models
from minidist.parallel.sequence_share.sequence_share import SequenceShare
from minidist.parallel.tensor_parallel.cuts import Cut, cuts
from minidist.parallel.tensor_parallel.plans import plan_for
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from minidist.parallel.tensor_parallel.vocabulary import vocabulary_of
from minidist.parallel.training.elementwise_optimizers import is_elementwise, refuse_unshareable


class Tied(NamedTuple):
    """A parameter that several stages of a pipeline hold copies of."""

    name: str | None  # on this rank; None if it has no copy
    stages: tuple[int, ...]


class RankModel(NamedTuple):
    """This rank's part of a model."""

    model: nn.Module  # the part, with the whole's names
    mesh: Mesh  # of all ranks
    tensor_map: TensorMap  # where its parameters lie in the whole
    token_share: SequenceShare | None  # which tokens of a row this rank has; None without cp
    stages: tuple[nn.Module, ...]  # the modules of this rank's pipeline chunks; empty without pp
    tied: tuple[Tied, ...]  # parameters whose gradients are summed over stages
    vocabulary: int | None  # its size if outputs are this rank's part of the logits; None if they are whole
    experts: frozenset[str] = frozenset()  # the names of parameters that only some dp ranks have, with ep
    expert_copies: Group = None  # the ranks that have the same experts


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
    layers: str | None = None,
    example: Any = None,
) -> RankModel:
    """Reduce `model` in place to this rank's part; a collective.

    Broadcasts the model over pp if layers are cut, over tp if matrices are, and over the ranks that share
    experts. Together with what the strategies send over dp and cp, rank 0's weights reach all ranks. Tensors
    on the meta device get memory and values after the model is cut (meta_device.py).

    plan: how tp cuts each module; None for `plan_for(model)`. layers, example: for `find_chain`. A ValueError
    names the axis by which the model cannot be partitioned.
    """
    if plan is not None and layout.tp == 1:
        raise ValueError("plan is given and the layout has tp=1, which cuts nothing; leave one of them out")
    if layout.pp == 1 and layers is not None:
        raise ValueError(f"layers is {layers!r} and the layout has pp=1, which cuts none; leave it out")
    for part in model.modules() if layout.pp > 1 else ():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # stages cannot send what it would give its layers in evaluation
    trace = find_chain(model, layout, layers, example) if layout.pp > 1 else None
    skeleton, state = None, [*model.named_parameters(), *model.named_buffers()]
    real = [tensor for _, tensor in state if not tensor.is_meta]
    if layout.tp * layout.pp * layout.ep > 1:
        require_same("parameters and buffers", state, None)
        if layout.pp > 1:
            broadcast_together(real, mesh.group("pp"))
        if len(real) < len(state):
            skeleton = Skeleton(model, initialize)
    whole = WholeModel(model)
    share = None
    if layout.cp > 1:
        # With dp=1 gradients travel between the same ranks while layers are recomputed.
        heads = sequence_share.key_heads(model) if layout.trading > 1 else None
        if heads is not None and heads // layout.tp < layout.trading:
            raise ValueError(
                f"cp_kind={layout.cp_kind!r} lets {layout.trading} ranks trade heads, and with "
                f"tp={layout.tp} they have {heads // layout.tp} key heads; "
                'give cp_kind="ring", or let fewer trade'
            )
        blocks = None if layout.trading == 1 else mesh.blocks("cp", layout.trading, again=True)
        share = SequenceShare(mesh.duplicate("cp") if layout.dp == 1 else mesh.group("cp"), blocks)
        if not transformers_models.apply(model, share):
            sequence_share.apply(model, share)
    experts: dict[str, Cut] = {}
    expert_ranks, expert_copies = (
        mesh.blocks("dp_cp", layout.ep, again=True) if layout.ep > 1 else (None, None)
    )
    if layout.ep > 1:
        broadcast_together(real, expert_ranks)
        for name, (shape, first) in share_experts(model, expert_ranks).items():
            offsets = first, *(0 for _ in shape[1:])
            experts[name] = Cut(tuple(shape), offsets, tuple(model.get_parameter(name).shape))
    if layout.tp > 1:
        parallelize(
            model, plan_for(model) if plan is None else plan, mesh.group("tp"), layout.sequence_parallel
        )
    vocabulary = vocabulary_of(model)
    stages: tuple[nn.Module, ...] = ()
    held_by: dict[str, list[int]] = {}
    if layout.pp > 1:
        stages, held_by = _keep_own_layers(model, layout, mesh.rank("pp"), whole, trace)
    own, stage_of = mesh.rank("pp"), {name: found[0] for name, found in held_by.items()}
    device = skeleton.device if skeleton is not None else None
    cut_by_tp = cuts(model)  # also what this stage drops
    experts = {name: cut for name, cut in experts.items() if not held_by or own in held_by[name]}
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    unneeded = [name for name in names if held_by and own not in held_by[name]]
    drop_parameters(model, unneeded, device)
    tensor_map = TensorMap(mesh, whole, model, cut_by_tp, stage_of, experts, expert_ranks)
    if skeleton is not None:
        skeleton.fill(model, tensor_map.cuts)
        tensor_map.device = skeleton.device
    for name in cut_by_tp.keys() & tensor_map.cuts.keys():  # for optimizers that join the parts: see `Muon`
        model.get_parameter(name).tp_cut = tensor_map.cuts[name]  # type: ignore[attr-defined]
    tied = _tied(whole, held_by, own)
    return RankModel(
        model, mesh, tensor_map, share, stages, tied, vocabulary, frozenset(experts), expert_copies
    )


def _keep_own_layers(
    model: nn.Module, layout: Layout, own: int, whole: WholeModel, trace: LayerTrace | None
) -> tuple[tuple[nn.Module, ...], dict[str, list[int]]]:
    """Keep only this stage's layers; returns them chunk by chunk, and the stages of each tensor by name."""
    list_name = "layers" if trace is None else trace.name
    layers: Any = model.get_submodule(list_name)
    # The layers whose stages need each tensor. What runs before the layers goes with the first.
    numbers = {f"{list_name}.{key}": number for number, key in enumerate(layers._modules)}
    needed_by: dict[str, Collection[int]] = {}
    for name in whole.tensors:
        layer = ".".join(name.split(".")[: list_name.count(".") + 2])
        if layer in numbers:
            needed_by[name] = [numbers[layer]]
        elif name not in whole.first:
            needed_by[name] = range(len(layers))  # a buffer
        else:
            assert trace is not None  # since a chain has nothing else
            first = whole.first[name]
            needing = {number for number, each in enumerate(trace.calls) if first in each.beside}
            needing |= {len(layers) - 1} if first in trace.after else set()
            needed_by[name] = needing | {0} if first in trace.before or not needing else needing
    # With the sizes of whole layers, the cut is the same on all ranks that share a layer.
    sizes = [0] * len(layers)
    for name, first in whole.first.items():
        if name == first or name.startswith(f"{list_name}."):
            for number in needed_by[name]:
                sizes[number] += whole.tensors[name].numel()
    found = cut([*layers], layout.pp * layout.chunks, weights=sizes)
    placement = schedule_kind(layout.schedule).placement(layout.pp, layout.chunks)
    holder = {i: rank for rank, layers_of in zip(placement.ranks, found, strict=True) for i in layers_of}
    mine = [found[stage] for stage in placement.stages[own]]
    stages: tuple[nn.Module, ...]
    if trace is None:
        stages = tuple(nn.Sequential(*(layers[i] for i in layers_of)) for layers_of in mine)
    else:
        stages = tuple(ModelStage(model, trace, layers_of) for layers_of in mine)
    for i, rank in holder.items():
        if rank != own:
            layers[i] = RemoteLayer(rank)
    held_by = {name: sorted({holder[i] for i in numbers}) for name, numbers in needed_by.items()}
    return stages, held_by


def _tied(whole: WholeModel, held_by: Mapping[str, Sequence[int]], own: int) -> tuple[Tied, ...]:
    """The trained parameters that several stages hold, in the same order on all ranks."""
    stages: dict[str, dict[int, str]] = {}
    for name, first in whole.first.items():
        for stage in held_by.get(name, [0]):
            stages.setdefault(first, {}).setdefault(stage, name)
    return tuple(
        Tied(names.get(own), tuple(sorted(names)))
        for first, names in stages.items()
        if len(names) > 1 and whole.tensors[first].requires_grad
    )


def checked(optimizer: MakeOptimizer, layout: Layout, tp_group: Group = None) -> MakeOptimizer:
    """Wrap an optimizer function: refuse an optimizer that cannot train a part of a model.

    tp_group: the ranks that have parts of the same matrices, for an optimizer that joins them.
    """

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
        is_cut = layout.tp * layout.ep > 1
        if is_cut or isinstance(made, torch.optim.LBFGS):
            refuse_unshareable(type(made))
        if getattr(made, "joins_cuts", False):
            made.tp_group = tp_group  # type: ignore[attr-defined]
        elif is_cut and isinstance(made, torch.optim.Optimizer) and not is_elementwise(type(made)):
            axis = f"tp={layout.tp}" if layout.tp > 1 else f"ep={layout.ep}"
            raise ValueError(
                f"optimizer is {name}, which needs whole parameters, and the layout has {axis}, "
                "which cuts them; use an elementwise one, such as torch.optim.AdamW, or dp instead. A class "
                "of yours that updates each element by itself says so with `elementwise = True`"
            )
        return made

    return make
