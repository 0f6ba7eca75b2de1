"""Master weights: the optimizer updates float32 copies of half-precision parameters.

An update is often smaller than half the distance between two neighbouring numbers in half precision. bfloat16
holds 8 bits, so a parameter of 1 does not change for any update below 0.002. In a float32 sum the updates
count, and the model computes with the rounded sum.

Sources: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1; the 12 bytes a parameter that the
copies and Adam's two moments take: Rajbhandari et al. 2020, "ZeRO", section 3.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from minidist.parallel.contract.training_state import parameter_like
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.guards.refusals import require_optimizer


def own_attribute(optimizer: torch.optim.Optimizer, name: str, then: Callable[[], object]) -> Any:
    """An attribute of an optimizer. A method, such as a schedule-free one's `train`, ends with `then`."""
    found = getattr(optimizer, name)
    if not inspect.ismethod(found):
        return found

    @wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = found(*args, **kwargs)
        then()
        return result

    return call


def master_of(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    """A copy of a parameter in another dtype; itself if it has that dtype, or no floating-point one."""
    if dtype in (None, parameter.dtype) or not parameter.is_floating_point():
        return parameter
    return parameter_like(parameter, parameter.detach().to(dtype))


def optimizer_of_masters(
    parameters: Sequence[nn.Parameter], make: MakeOptimizer, dtype: torch.dtype | None
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """The optimizer that `make` makes of the parameters' masters, and these; without a dtype themselves."""
    masters = [master_of(parameter, dtype) for parameter in parameters]
    optimizer = make(masters)
    require_optimizer(optimizer)
    known = set(map(id, masters))
    if dtype is not None and any(
        id(p) not in known for group in optimizer.param_groups for p in group["params"]
    ):
        raise ValueError(
            "optimizer did not use the parameters that it was called with, which are float32 copies of "
            "the model's; give a function of its parameters, such as "
            "functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    return optimizer, masters


def follow_own_methods(optimizer: torch.optim.Optimizer, then: Callable[..., object]) -> None:
    """Call `then` after each method that is the optimizer's own, such as a schedule-free one's `train`."""
    for name in {*dir(type(optimizer))} - {*dir(torch.optim.Optimizer)}:
        if not name.startswith("_") and callable(getattr(type(optimizer), name)):  # no property
            setattr(optimizer, name, own_attribute(optimizer, name, then))
