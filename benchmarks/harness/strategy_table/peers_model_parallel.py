"""torch's model parallelism, as peers: tensor parallelism, alone and combined with FSDP2, and pipelines."""

from __future__ import annotations

from typing import Any

from torch import nn

import minidist as md
from minidist.benchmarks.harness.steps.pipeline_steps import torch_loop
from minidist.benchmarks.harness.steps.tensor_steps import cut_blocks
from minidist.benchmarks.harness.steps.training_steps import ADAMW, plain_loop
from minidist.benchmarks.harness.strategy_table.programs import Program
from minidist.benchmarks.harness.strategy_table.strategies import Work
from minidist.parallel.contract.schedule_kinds import ScheduleKind
from minidist.parallel.pipeline.layer_by_layer import cut


def parallelized(work: Work) -> Program:
    """Cut every block with `parallelize_module`; an MLP's layers alternately by columns and by rows."""
    from torch.distributed.device_mesh import init_device_mesh

    model = work.build()
    _cut(model, init_device_mesh("cpu", (md.size(),)))
    return _loop(model)


def sequence_parallelized(work: Work) -> Program:
    """Cut a GPT's blocks, and compute norms and residual sums on each rank's share of the tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, mesh = work.build(), init_device_mesh("cpu", (md.size(),))
    tokens, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
    block = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(output_layouts=tokens),
        "mlp_norm": SequenceParallel(),
        "mlp": gathered,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=tokens),
    }
    layers: Any = model.layers
    last = len(layers) - 1
    styles: dict[str, Any] = {
        "layers.0": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=tokens),
        **{f"layers.{i}.{name}": style for i in range(1, last) for name, style in block.items()},
        f"layers.{last}.norm": SequenceParallel(),
        f"layers.{last}.output": ColwiseParallel(input_layouts=tokens, output_layouts=whole),
    }
    parallelize_module(model, mesh, styles)
    return _loop(model)


def fully_sharded_and_cut(work: Work) -> Program:
    """Share the matrices between two ranks, and shard each rank's part over the others with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (md.size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = work.build()
    _cut(model, mesh["tp"])
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _loop(model, (md.rank() // 2, md.size() // 2))


def _cut(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers: Any = model.layers
    if hasattr(layers[0], "linear"):
        styles: dict[str, Any] = {
            f"layers.{index}.linear": RowwiseParallel() if index % 2 else ColwiseParallel()
            for index in range(len(layers))
        }
        parallelize_module(model, mesh, styles)
    else:
        cut_blocks(model, mesh)


def _loop(model: nn.Module, share: tuple[int, int] = (0, 1)) -> Program:
    # AdamW's fused call takes plain tensors or DTensors, not both, so each kind has a group of its own. One
    # call for each parameter would take far longer on DTensors.
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kind = type(parameter.data), getattr(parameter, "device_mesh", None)
        kinds.setdefault(kind, []).append(parameter)
    groups = [{"params": parameters} for parameters in kinds.values()]
    optimizer = ADAMW(groups)
    return Program(plain_loop(model, optimizer), share, model, optimizer)


def pipelined(kind: ScheduleKind, work: Work) -> Program:
    """Run a schedule of `torch.distributed.pipelining`, on the same stages as our own rows."""
    placement = kind.placement(md.size(), kind.least_chunks)
    layers: Any = work.build().layers
    parts = cut(layers, len(placement.ranks))
    own = placement.stages[md.rank()]
    stages = {stage: nn.Sequential(*(layers[i] for i in parts[stage])) for stage in own}
    modules = nn.ModuleList(stages.values())
    optimizer = ADAMW(modules.parameters())
    train = torch_loop(kind.torch_name, {**stages}, len(parts), 4, optimizer)
    return Program(train, module=modules, optimizer=optimizer)
