"""What `FullyShard` is given: checked before it takes the first parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minidist.parallel.refusals import require_trained


def check_arguments(
    module: nn.Module,
    optimizer_class: Any,
    offload: Any,
    units: Any,
    initialize: Any,
    prefetch: Any,
    master: Any,
) -> None:
    """TypeError or ValueError where one of them is not what `FullyShard` takes."""
    if isinstance(optimizer_class, torch.optim.Optimizer) or not callable(optimizer_class):
        given = repr(optimizer_class) if isinstance(optimizer_class, str) else type(optimizer_class).__name__
        raise TypeError(f"optimizer_class is {given}; give a class, such as torch.optim.AdamW")
    if isinstance(offload, str) and not offload:
        raise ValueError("offload is '', which names no directory; give False, 'cpu' or a directory")
    if units is not None and (isinstance(units, str | type | nn.Module) or not isinstance(units, Iterable)):
        raise TypeError(f"units is {units!r}; give a list of classes or modules, such as [nn.Linear]")
    if initialize is not None and not callable(initialize):
        raise TypeError(
            f"initialize is {initialize!r}; give a function that fills a module's own parameters, or None"
        )
    if prefetch is not None and not isinstance(prefetch, bool):
        raise TypeError(f"prefetch is {prefetch!r}; give True, False, or None to have it chosen")
    if master is not None and not (isinstance(master, torch.dtype) and master.is_floating_point):
        raise TypeError(f"master is {master!r}; give a floating-point dtype, such as torch.float32, or None")
    require_trained("module", module.parameters())
