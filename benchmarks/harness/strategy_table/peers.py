"""The training loops of other libraries, to compare the strategies with.

Each of `PEERS` is a function from the work to a program. All ranks call it. Each loop is written as in that
library's own tutorial. Those named in `strategies.OUTSIDE` need the packages of `minidist[peers]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from minidist.benchmarks.harness.steps.training_steps import ADAMW, plain_loop
from minidist.benchmarks.harness.strategy_table.peer_packages import accelerated, deep_speed
from minidist.benchmarks.harness.strategy_table.peers_model_parallel import (
    fully_sharded_and_cut,
    parallelized,
    pipelined,
    sequence_parallelized,
)
from minidist.benchmarks.harness.strategy_table.programs import Program
from minidist.benchmarks.harness.strategy_table.strategies import EVERY, OUTSIDE, Work
from minidist.parallel.contract.schedule_kinds import SCHEDULES

Make = Callable[[Work], Program]


def missing(peer: str) -> str | None:
    """Return the reason why a peer can't be measured here, or None if it can."""
    package = OUTSIDE.get(peer.split(" ")[0])
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: pip install 'minidist[peers]'"


def plain(work: Work, checkpointed: bool = False) -> Program:
    """Train in one process, without any wrapper."""
    model = work.build()
    if checkpointed:
        _checkpoint(model)
    optimizer = ADAMW(model.parameters())
    # Memory of recomputed activations is invisible from outside, so a checkpointed model is not counted.
    return Program(plain_loop(model, optimizer), module=None if checkpointed else model, optimizer=optimizer)


def ddp(work: Work, hook: str = "", checkpointed: bool = False) -> Program:
    """Train with DistributedDataParallel, optionally with a compression hook or checkpointed layers.

    hook: "float16" or "PowerSGD"; torch's own hook for bfloat16 works only on a GPU.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = work.build()
    if checkpointed:
        _checkpoint(model)
    # PowerSGD sends a bucket's second message when the first has arrived. With several buckets over gloo, the
    # order would differ between ranks and the run would fail, so there is one bucket.
    parallel = DistributedDataParallel(model, bucket_cap_mb=1000 if hook == "PowerSGD" else None)
    if hook == "float16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = ADAMW(parallel.parameters())
    counted = None if checkpointed else parallel
    return Program(plain_loop(parallel, optimizer), (md.rank(), md.size()), counted, optimizer)


def _checkpoint(model: nn.Module) -> None:
    """Let each layer keep only its inputs, and recompute the rest."""
    from torch.utils.checkpoint import checkpoint

    layers: Any = model.layers
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def post_local_sgd(work: Work) -> Program:
    """Train with torch's local SGD, an optimizer that averages the parameters every few steps."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = work.build()
    optimizer = PostLocalSGDOptimizer(ADAMW(model.parameters()), PeriodicModelAverager(EVERY, warmup_steps=0))
    return Program(plain_loop(model, optimizer), (md.rank(), md.size()), model, optimizer)


def zero_redundancy(work: Work) -> Program:
    """Train with DistributedDataParallel and an optimizer whose state is sharded."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel = DistributedDataParallel(work.build())
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), optimizer_class=torch.optim.AdamW, **ADAMW.keywords
    )
    return Program(plain_loop(parallel, optimizer), (md.rank(), md.size()), parallel, optimizer)


def fully_sharded(work: Work, keep: bool = False) -> Program:
    """Train with FSDP2, one unit per layer. keep: parameters stay whole between forward and backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = work.build(), init_device_mesh("cpu", (md.size(),))
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
    optimizer = ADAMW(model.parameters())
    return Program(plain_loop(model, optimizer), (md.rank(), md.size()), model, optimizer)


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
    "torch fully_shard, parameters kept": partial(fully_sharded, keep=True),
    "torch parallelize_module": parallelized,
    "torch parallelize_module, SequenceParallel": sequence_parallelized,
    "torch fully_shard and tensor": fully_sharded_and_cut,
    **{
        f"torch {kind.torch_name}": partial(pipelined, kind) for kind in SCHEDULES.values() if kind.torch_name
    },
    "Accelerate": accelerated,
    **{f"DeepSpeed ZeRO-{stage}": partial(deep_speed, stage) for stage in (1, 2, 3)},
}
"""The peers, by the names that the report gives them."""
INEXACT = ("torch DDP, float16 hook", "torch DDP, PowerSGD hook", "torch PostLocalSGD")
"""Peers whose losses differ from those of one process."""
