"""The training loops of other libraries, to compare ours with.

Each of `PEERS` is a function from the work to a program. All ranks call it. Each loop is written as in that
library's own tutorial. Those named in `OUTSIDE` need the packages of `minidist[peers]`, which are imported
only when one of their programs is made, and use the existing process group.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from minidist.benchmarks.harness.training.pipelines import torch_pipeline
from minidist.benchmarks.harness.training.programs import EVERY, Program, adamw_for, looped
from minidist.benchmarks.harness.training.what_is_trained import ADAMW, Work, cross_entropy, plain_loop
from minidist.model.blocks import Block
from minidist.parallel.contract.schedule_kinds import SCHEDULES

Make = Callable[[Work], Program]
OUTSIDE = {"Accelerate": "accelerate", "DeepSpeed": "deepspeed"}
"""Peers from packages of their own: the first word of the peer's name, and the module to import."""


def missing(peer: str) -> str | None:
    """Return the reason why a peer can't be measured here, or None if it can."""
    package = OUTSIDE.get(peer.split(" ")[0])
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: pip install 'minidist[peers]'"


def plain(work: Work, checkpointed: bool = False) -> Program:
    """Train in one process, without any wrapper."""
    # Memory of recomputed activations is invisible from outside, so a checkpointed model is not counted.
    return looped(_built(work, checkpointed), share=(0, 1), counted=not checkpointed)


def ddp(work: Work, hook: str = "", checkpointed: bool = False) -> Program:
    """Train with DistributedDataParallel, optionally with a compression hook or checkpointed layers.

    hook: "float16" or "PowerSGD"; torch's own hook for bfloat16 works only on a GPU.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = _built(work, checkpointed)
    # PowerSGD sends a bucket's second message when the first has arrived. With several buckets over gloo, the
    # order would differ between ranks and the run would fail, so there is one bucket.
    parallel = DistributedDataParallel(model, bucket_cap_mb=1000 if hook == "PowerSGD" else None)
    if hook == "float16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return looped(parallel, counted=not checkpointed)


def _built(work: Work, checkpointed: bool) -> nn.Module:
    """Build the model. checkpointed: each layer keeps only its inputs, and recomputes the rest."""
    from torch.utils.checkpoint import checkpoint

    model = work.build()
    layers: Any = model.layers if checkpointed else ()
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def post_local_sgd(work: Work) -> Program:
    """Train with torch's local SGD, an optimizer that averages the parameters every few steps."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = work.build()
    optimizer = PostLocalSGDOptimizer(ADAMW(model.parameters()), PeriodicModelAverager(EVERY, warmup_steps=0))
    return looped(model, optimizer)


def zero_redundancy(work: Work) -> Program:
    """Train with DistributedDataParallel and an optimizer whose state is sharded."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel = DistributedDataParallel(work.build())
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), optimizer_class=torch.optim.AdamW, **ADAMW.keywords
    )
    return looped(parallel, optimizer)


def fully_sharded(work: Work, reshard: bool | None = None) -> Program:
    """Train with FSDP2, one unit per layer; where weights are tied, one per block.

    reshard: whether parameters are given up between forward and backward pass; None for torch's own choice.
    """
    from torch.distributed.fsdp import fully_shard

    model, mesh = work.build(), _mesh()
    layers: Any = model.layers
    units = [layer for layer in layers if isinstance(layer, Block) or not work.tied]
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    return looped(model)


def parallelized(work: Work) -> Program:
    """Cut every block with `parallelize_module`; an MLP's layers alternately by columns and by rows."""
    model = work.build()
    _cut(model, _mesh())
    return looped(model, adamw_for(model), (0, 1))


def all_parallelized(work: Work) -> Program:
    """Cut the blocks, the token table and the head with torch, and compute the loss of the cut logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as cut

    model, mesh = work.build(), _mesh()
    _cut(model, mesh)
    layers: Any = model.layers
    first, last = layers[0], layers[-1]
    whole, part = Replicate(), Shard(-1)
    cut.parallelize_module(first, mesh, {"token": cut.RowwiseParallel(input_layouts=whole)})
    style = cut.ColwiseParallel(input_layouts=whole, output_layouts=part, use_local_output=False)
    cut.parallelize_module(last, mesh, {"output": style})
    if work.tied:
        last.output.weight = first.token.weight  # torch has untied the two
    return looped(model, adamw_for(model), (0, 1), around=cut.loss_parallel)


def sequence_parallelized(work: Work) -> Program:
    """Cut a GPT's blocks, and compute norms and residual sums on each rank's share of the tokens."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as cut

    model = work.build()
    tokens, whole = Shard(1), Replicate()
    gathered = cut.PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
    block = {
        "attention_norm": cut.SequenceParallel(),
        "attention": gathered,
        **{f"attention.{name}": cut.ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": cut.RowwiseParallel(output_layouts=tokens),
        "mlp_norm": cut.SequenceParallel(),
        "mlp": gathered,
        "mlp.up": cut.ColwiseParallel(),
        "mlp.down": cut.RowwiseParallel(output_layouts=tokens),
    }
    layers: Any = model.layers
    last = len(layers) - 1
    styles: dict[str, Any] = {
        "layers.0": cut.PrepareModuleOutput(output_layouts=whole, desired_output_layouts=tokens),
        **{f"layers.{i}.{name}": style for i in range(1, last) for name, style in block.items()},
        f"layers.{last}.norm": cut.SequenceParallel(),
        f"layers.{last}.output": cut.ColwiseParallel(input_layouts=tokens, output_layouts=whole),
    }
    cut.parallelize_module(model, _mesh(), styles)
    return looped(model, adamw_for(model), (0, 1))


def fully_sharded_and_cut(work: Work) -> Program:
    """Share the matrices between two ranks, and shard each rank's part over the others with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (md.size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = work.build()
    _cut(model, mesh["tp"])
    layers: Any = model.layers
    for unit in [*layers, model]:
        fully_shard(unit, mesh=mesh["dp"])
    return looped(model, adamw_for(model), (md.rank() // 2, md.size() // 2))


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (md.size(),))


def _cut(model: nn.Module, mesh: Any) -> None:
    """Cut attention by heads and the MLP by its hidden width, in each block of a GPT, over a torch mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = "attention.query", "attention.key", "attention.value", "mlp.up"
    rows = "attention.output", "mlp.down"
    layers: Any = model.layers
    styles: dict[str, Any] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, Block):
            styles |= {f"layers.{index}.{name}": ColwiseParallel() for name in columns}
            styles |= {f"layers.{index}.{name}": RowwiseParallel() for name in rows}
        elif hasattr(layer, "linear"):  # of an MLP
            styles[f"layers.{index}.linear"] = RowwiseParallel() if index % 2 else ColwiseParallel()
    parallelize_module(model, mesh, styles)


def accelerated(work: Work) -> Program:
    """Train with a model and an optimizer that Accelerate has prepared."""
    _set_launcher_variables()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.build()
    prepared, optimizer = accelerator.prepare(model, ADAMW(model.parameters()))
    loop = plain_loop(prepared, optimizer, backward=accelerator.backward)
    return Program(loop, (md.rank(), md.size()), model, optimizer.optimizer)


def deep_speed(stage: int, work: Work) -> Program:
    """Train on a DeepSpeed engine with this stage of ZeRO, in float32."""
    _set_launcher_variables()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning)  # it calls functions that torch has renamed
    import deepspeed

    # DeepSpeed would spend a minute compiling its own communication operator; all programs here use gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = work.build()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.rows // md.size(),
        "train_batch_size": work.rows,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # its default is 1, but no other program here clips
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=ADAMW(model.parameters()), config=config)

    def train(inputs: Tensor, targets: Tensor) -> float:
        loss = cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Program(train, (md.rank(), md.size()))


def _set_launcher_variables() -> None:
    """Set the environment variables that a launcher would set and that both packages read."""
    rank, size = str(md.rank()), str(md.size())
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


PEERS: dict[str, Make] = {
    "plain torch": plain,
    "torch checkpoint": partial(plain, checkpointed=True),
    "torch DDP": ddp,
    "torch DDP, checkpoint": partial(ddp, checkpointed=True),
    "torch DDP, float16 hook": partial(ddp, hook="float16"),
    "torch DDP, PowerSGD hook": partial(ddp, hook="PowerSGD"),
    "torch PostLocalSGD": post_local_sgd,
    "torch ZeroRedundancyOptimizer": zero_redundancy,
    "torch fully_shard": fully_sharded,
    "torch fully_shard, parameters kept": partial(fully_sharded, reshard=False),
    "torch parallelize_module": parallelized,
    "torch parallelize_module, loss_parallel": all_parallelized,
    "torch parallelize_module, SequenceParallel": sequence_parallelized,
    "torch fully_shard and tensor": fully_sharded_and_cut,
    **{
        f"torch {kind.torch_name}": partial(torch_pipeline, name)
        for name, kind in SCHEDULES.items()
        if kind.torch_name
    },
    "Accelerate": accelerated,
    **{f"DeepSpeed ZeRO-{stage}": partial(deep_speed, stage) for stage in (1, 2, 3)},
}
"""The peers, by the names that the report gives them."""
INEXACT = ("torch DDP, float16 hook", "torch DDP, PowerSGD hook", "torch PostLocalSGD")
"""Peers whose losses differ from those of one process."""
