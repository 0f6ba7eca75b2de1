"""From a model, an optimizer and a layout to the engine that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minidist import comm
from minidist._names import unknown
from minidist.model.loss import cross_entropy
from minidist.parallel.clipping import check_max_norm
from minidist.parallel.engine import Engine, Loss, MakeOptimizer
from minidist.parallel.fully_sharded import FullySharded
from minidist.parallel.hybrid import HybridEngine
from minidist.parallel.layout import Layout
from minidist.parallel.ownership import ENGINE, claim, require_free
from minidist.parallel.precision import LossScale, Precision, fill_masters
from minidist.parallel.prepare_checks import check_model, check_types, put_back_on_error
from minidist.parallel.recompute import recompute
from minidist.parallel.refusals import refuse_renormed
from minidist.parallel.replicated import Replicated
from minidist.parallel.strategy import Strategy
from minidist.parallel.zero_strategy import ShardedState

_AVAILABLE = {"tp": 1, "pp": 1}
"""Fields of a layout that this version takes at one value alone."""
OPTIONS = {"bucket_mb", "overlap", "compression", "algorithm", "broadcast_buffers"}
"""Of `DataParallel`, that `prepare` passes on; its group is the layout's."""
FULLY_SHARD = {"offload", "units", "initialize", "prefetch"}
"""Of `FullyShard`, likewise; master copies are the precision's."""


def prepare(
    model: nn.Module,
    optimizer: MakeOptimizer,
    layout: Layout | None = None,
    loss: Loss = cross_entropy,
    data_parallel: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    loss_scale: LossScale | None = None,
    fully_shard: Mapping[str, Any] | None = None,
) -> Engine:
    """An engine that trains `model` on the ranks of `layout`. Every rank of the world calls it.

    >>> engine = md.prepare(model, partial(torch.optim.AdamW, lr=3e-4), md.Layout(dp=2))
    >>> loss = engine.step(inputs, targets)

    The model trains where its parameters are. The ranks need not start from the same weights: rank 0's are
    sent to all. With precision "bf16" or "fp16" in the layout the model, which is a float32 one, is converted
    in place, and what the optimizer updates begins with its float32 values; see precision.py. With
    `recompute` its layers keep their inputs only; see recompute.py. Where this raises an error, the model is
    in its dtype, and recomputes nothing, as before.

    Args:
        model: the same architecture on all ranks.
        optimizer: a function from parameters to a torch optimizer.
        layout: how many ranks do what; None for one rank.
        loss: from outputs and targets to the mean over their rows.
        data_parallel: options of `DataParallel`, such as {"compression": "float16"}.
        clip_norm: shorten the gradients where their norm over all ranks is larger; None never does. As with
            `torch.nn.utils.clip_grad_norm_`, a norm that is not finite makes weights that are not.
        loss_scale: for precision "fp16", how the factor on the loss starts and grows.
        fully_shard: options of `FullyShard` for zero=3, such as {"offload": "/scratch"}.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the layout's ranks are not the world's, or it asks for what this version has not, or
            another object trains the model.
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
    if layout.ranks != comm.size():
        raise ValueError(
            f"the layout needs {layout.ranks} ranks (dp {layout.dp} x tp {layout.tp} x pp {layout.pp}) and "
            f"the world has {comm.size()}; change the layout, or start {layout.ranks} ranks"
        )
    check_available(layout)
    check_types(loss, data_parallel, fully_shard, loss_scale)
    check_model(model, layout.zero)
    require_free(model.named_parameters())
    if layout.ranks > 1 or layout.zero == 3 or layout.precision != "fp32":
        refuse_renormed(model)
    _check_options("data_parallel", data_parallel, OPTIONS)
    _check_options("fully_shard", fully_shard, FULLY_SHARD)
    if fully_shard and layout.zero != 3:
        raise ValueError(
            f"fully_shard is {dict(fully_shard)} and the layout has zero={layout.zero}; its options are for "
            "zero=3"
        )
    if clip_norm is not None:
        check_max_norm("clip_norm", clip_norm)
    precision = Precision(layout.precision, loss_scale)
    with put_back_on_error(model, precision.dtype is not None):
        return _prepared(model, optimizer, layout, loss, data_parallel, clip_norm, precision, fully_shard)


def _prepared(
    model: nn.Module,
    optimizer: MakeOptimizer,
    layout: Layout,
    loss: Loss,
    data_parallel: Mapping[str, Any] | None,
    clip_norm: float | None,
    precision: Precision,
    fully_shard: Mapping[str, Any] | None,
) -> Engine:
    """`prepare`, once its arguments are checked."""
    exact = precision.convert(model)
    if layout.recompute:
        recompute(model)
    strategy: Strategy
    if layout.zero == 3:
        if data_parallel:
            raise ValueError(
                f"data_parallel is {dict(data_parallel)} and the layout has zero=3, which has none of its "
                "options; leave it out"
            )
        strategy = FullySharded(model, optimizer, fully_shard, precision.master)
    elif layout.zero:
        strategy = ShardedState(model, optimizer, layout.zero, data_parallel, precision.master)
    else:
        strategy = Replicated(model, optimizer, data_parallel, precision.master)
    fill_masters(strategy, exact)
    engine = HybridEngine(model, strategy, layout, loss, precision, clip_norm)
    claim(engine, ENGINE, model.parameters())
    return engine


def _check_options(name: str, options: Mapping[str, Any] | None, known: set[str]) -> None:
    others = set(options or {}) - known
    if others:
        raise unknown(f"option of {name}", min(others), sorted(known))


def check_available(layout: Layout) -> None:
    """ValueError where a layout asks for a strategy that this version has not."""
    for name, only in _AVAILABLE.items():
        value = getattr(layout, name)
        if value != only:
            raise ValueError(f"{name}={value!r} in the layout; this version trains with {name}={only!r} only")
