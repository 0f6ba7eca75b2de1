"""From a model, an optimizer and a layout to the engine that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minidist import comm
from minidist._names import unknown
from minidist.model.loss import cross_entropy
from minidist.parallel.engine import Engine, Loss, MakeOptimizer
from minidist.parallel.fully_sharded import FullySharded
from minidist.parallel.hybrid import HybridEngine
from minidist.parallel.layout import Layout
from minidist.parallel.replicated import Replicated

_AVAILABLE = {"tp": (1,), "pp": (1,), "zero": (0, 3), "precision": ("fp32",), "recompute": (False,)}
"""Fields of a layout that this version takes at some values alone."""
OPTIONS = {"bucket_mb", "overlap", "compression", "algorithm", "broadcast_buffers"}
"""Of `DataParallel`, that `prepare` passes on; its group is the layout's."""


def prepare(
    model: nn.Module,
    optimizer: MakeOptimizer,
    layout: Layout | None = None,
    loss: Loss = cross_entropy,
    data_parallel: Mapping[str, Any] | None = None,
) -> Engine:
    """An engine that trains `model` on the ranks of `layout`. Every rank of the world calls it.

    >>> engine = md.prepare(model, partial(torch.optim.AdamW, lr=3e-4), md.Layout(dp=2))
    >>> loss = engine.step(inputs, targets)

    The model trains where its parameters are. The ranks need not start from the same weights: rank 0's are
    sent to all.

    Args:
        model: the same architecture on all ranks.
        optimizer: a function from parameters to a torch optimizer.
        layout: how many ranks do what; None for one rank.
        loss: from outputs and targets to the mean over their rows.
        data_parallel: options of `DataParallel`, such as {"compression": "float16"}.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the layout's ranks are not the world's, or it asks for what this version has not.
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
    unknown_options = set(data_parallel or {}) - OPTIONS
    if unknown_options:
        raise unknown("option of data_parallel", min(unknown_options), sorted(OPTIONS))
    if layout.zero == 3:
        return HybridEngine(model, FullySharded(model, optimizer), layout, loss)
    return HybridEngine(model, Replicated(model, optimizer, data_parallel), layout, loss)


def check_available(layout: Layout) -> None:
    """ValueError where a layout asks for a strategy that this version has not."""
    for name, those in _AVAILABLE.items():
        value = getattr(layout, name)
        if value not in those:
            only = " or ".join(f"{name}={each!r}" for each in those)
            raise ValueError(f"{name}={value!r} in the layout; this version trains with {only} only")
