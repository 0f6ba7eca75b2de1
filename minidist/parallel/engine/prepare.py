"""`prepare`: make the engine that trains a model on the ranks of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from minidist._names import unknown
from minidist.comm.mesh import Mesh
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.engine import Engine, Loss, MakeOptimizer
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.strategy import Strategy
from minidist.parallel.engine.partition_model import RankModel, checked, partition_model
from minidist.parallel.engine.prepare_checks import check_model, check_types, put_back_on_error
from minidist.parallel.engine.training_step import HybridEngine
from minidist.parallel.guards.ownership import ENGINE, claim, require_free
from minidist.parallel.guards.refusals import refuse_renormed, require_alike
from minidist.parallel.sharding.data_parallel_strategy import Replicated
from minidist.parallel.sharding.fully_shard_strategy import FullySharded
from minidist.parallel.sharding.zero_strategy import ShardedState
from minidist.parallel.training.clipping import check_max_norm
from minidist.parallel.training.precision import LossScale, Precision, fill_masters
from minidist.parallel.training.recompute import recompute

DATA_PARALLEL = {"bucket_mb", "overlap", "compression", "algorithm", "broadcast_buffers"}
"""The options of `DataParallel` that `prepare` passes on. The layout gives the group."""
FULLY_SHARD = {"offload", "units", "initialize", "prefetch"}
"""The options of `FullyShard` that `prepare` passes on. The precision decides about master weights."""


def prepare(
    model: nn.Module,
    optimizer: MakeOptimizer,
    layout: Layout | None = None,
    loss: Loss = cross_entropy,
    data_parallel: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    loss_scale: LossScale | None = None,
    fully_shard: Mapping[str, Any] | None = None,
    plan: Mapping[str, str] | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
) -> Engine:
    """An engine that trains `model` on the ranks of `layout`. Every rank of the world calls it.

    >>> engine = md.prepare(model, partial(torch.optim.AdamW, lr=3e-4), md.Layout(dp=2))
    >>> loss = engine.step(inputs, targets)

    The model stays on its device and is changed in place to this rank's part. Ranks need not start from the
    same weights: rank 0 sends its own to all. With precision "bf16" or "fp16" a float32 model is converted,
    and the optimizer updates master weights that start from its float32 values (training/precision.py). With
    `recompute` layers keep only their inputs (training/recompute.py).

    | Axis | What it needs |
    |---|---|
    | dp | nothing; each rank has its own rows |
    | tp | a plan of matrices to cut; GPT and MLP have one |
    | pp | a model that is a chain `model.layers`, each from tensor to tensor (pipeline/layer_chain.py) |
    | cp | attention with an attribute `attend`, as in GPT; inputs and targets (B, T) |

    Ranks that differ only in tp, pp or cp pass the same rows. All axes can be combined, with ZeRO stage 1
    too. Stages 2 and 3 do not work with pp: they would send gradients, or parameters, once for each
    micro-batch.

    A model that fits on no rank can be made on the meta device for a layout with tp, pp or zero=3. Ranks then
    get memory for their parts and for one module at a time; rank 0 initializes modules as one process would.

    If `prepare` raises an error, the model is as it was, except for values that rank 0 has sent.

    Args:
        model: the same architecture on all ranks.
        optimizer: a function from parameters to a torch optimizer.
        layout: how many ranks do what; None for one rank.
        loss: from outputs and targets to the mean over their rows.
        data_parallel: options of `DataParallel`, such as {"compression": "float16"}.
        clip_norm: the largest norm of the gradients over all ranks; None for no clipping. As with
            `torch.nn.utils.clip_grad_norm_`, a norm that is not finite makes weights that are not finite.
        loss_scale: for precision "fp16", how the factor on the loss starts and grows.
        fully_shard: options of `FullyShard` for zero=3, such as {"offload": "/scratch"}.
        plan: for tp, how to cut each module, as for `parallelize`; None for the model's own plan.
        initialize: gives a submodule's own parameters and buffers their values, for example from a file, if
            they were on the meta device; None for the model's method `initialize_part`, or each submodule's
            `reset_parameters`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the layout has another number of ranks than the world, or differs between ranks; the
            model, the optimizer or an option does not work with an axis, which is named; or another object
            trains the model.
    """
    layout = Layout() if layout is None else layout
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as md.Layout(dp=2)")
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give a function from parameters to an optimizer, "
            "such as functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    check_available(layout)
    check_types(loss, data_parallel, fully_shard, loss_scale)
    check_model(model, layout)
    require_free(model.named_parameters())
    if layout.ranks > 1 or layout.zero == 3 or layout.precision != "fp32":
        refuse_renormed(model)
    _check_options("data_parallel", data_parallel, DATA_PARALLEL)
    _check_options("fully_shard", fully_shard, FULLY_SHARD)
    if fully_shard and layout.zero != 3:
        raise ValueError(
            f"fully_shard is {dict(fully_shard)} and the layout has zero={layout.zero}; its options are for "
            "zero=3"
        )
    if data_parallel and layout.zero == 3:
        raise ValueError(
            f"data_parallel is {dict(data_parallel)} and the layout has zero=3, which has none of its "
            "options; leave it out"
        )
    if initialize is None:
        initialize = (fully_shard or {}).get("initialize")
    elif layout.zero == 3:
        fully_shard = {**(fully_shard or {}), "initialize": initialize}
    if clip_norm is not None:
        check_max_norm("clip_norm", clip_norm)
    # Before any other collective: ranks with other layouts would wait in other ones.
    require_alike("md.prepare", {**vars(layout), "clip_norm": clip_norm}, None)
    mesh = Mesh(pp=layout.pp, dp=layout.dp, cp=layout.cp, tp=layout.tp)
    precision = Precision(layout.precision, loss_scale)
    with put_back_on_error(model, precision.dtype is not None):
        exact = precision.convert(model)
        part = partition_model(model, layout, mesh, plan, initialize)
        if layout.recompute:
            recompute(model)
        strategy = _strategy(part, optimizer, layout, data_parallel, precision, fully_shard)
        fill_masters(strategy, exact, part.placement.own)
        engine = HybridEngine(model, strategy, layout, loss, precision, clip_norm, part)
        claim(engine, ENGINE, model.parameters())
        return engine


def _strategy(
    part: RankModel,
    optimizer: MakeOptimizer,
    layout: Layout,
    data_parallel: Mapping[str, Any] | None,
    precision: Precision,
    fully_shard: Mapping[str, Any] | None,
) -> Strategy:
    """The strategy by which the ranks with the same part of the model train it."""
    model, master, group = part.model, precision.master, part.mesh.group("dp_cp")
    if layout.tp * layout.pp > 1:
        optimizer = checked(optimizer, layout)
    if layout.zero == 3:
        return FullySharded(model, optimizer, fully_shard, master, group)
    if layout.zero:
        return ShardedState(model, optimizer, layout.zero, data_parallel, master, group)
    return Replicated(model, optimizer, data_parallel, master, group)


def _check_options(name: str, options: Mapping[str, Any] | None, known: set[str]) -> None:
    others = set(options or {}) - known
    if others:
        raise unknown(f"option of {name}", min(others), sorted(known))


def check_available(layout: Layout) -> None:
    """ValueError if a layout combines axes that training does not support together."""
    if layout.pp > 1 and layout.zero > 1:
        moved = "gradients" if layout.zero == 2 else "parameters"
        raise ValueError(
            f"zero={layout.zero} with pp={layout.pp} in the layout would send {moved} once for each of a "
            "pipeline's micro-batches, which costs more than it saves; give zero=1, or pp=1"
        )
