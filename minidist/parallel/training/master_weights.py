"""Master weights: the optimizer updates float32 copies of half-precision parameters.

An update is often smaller than half the distance between two neighbouring numbers in half precision. bfloat16
holds 8 bits, so a parameter of 1 does not change for any update below 0.002. In a float32 sum the updates
count, and the model computes with the rounded sum.

Sources: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1; the 12 bytes a parameter that the
copies and Adam's two moments take: Rajbhandari et al. 2020, "ZeRO", section 3.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

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
    parameters: Sequence[nn.Parameter], make: MakeOptimizer, dtypes: Sequence[torch.dtype | None]
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """The optimizer that `make` makes of the parameters' masters, and these; without a dtype themselves."""
    masters = [master_of(parameter, dtype) for parameter, dtype in zip(parameters, dtypes, strict=True)]
    optimizer = make(masters)
    require_optimizer(optimizer)
    known = set(map(id, masters))
    if any(dtypes) and any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
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


class MasterWeights(torch.optim.Optimizer):
    """An optimizer whose parameters are copies, in another dtype, of the model's parameters.

    >>> optimizer = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=3e-4))
    >>> loss.backward()
    >>> optimizer.step()

    `step` casts the gradients to the masters' dtype, lets the wrapped optimizer update the masters, and casts
    the result back into the parameters. Groups, state and defaults are those of the wrapped optimizer, so
    learning-rate schedulers work and a `state_dict` is one of its own. In float32 it holds 4 bytes for each
    parameter between steps, plus the optimizer's state; during a step it needs 4 more, for the gradients.

    Parameters of the masters' `dtype`, and integer ones, are their own masters. Raises ValueError if `make`
    gives the optimizer other parameters than it was called with.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: MakeOptimizer, dtype: torch.dtype = torch.float32
    ) -> None:
        self.parameters, self._dtype = [*parameters], dtype
        self.factor = 1.0  # the next step multiplies the cast gradients by this, then resets it to 1
        self.inner, self.masters = optimizer_of_masters(self.parameters, make, [dtype] * len(self.parameters))
        super().__init__(self.masters or [{"params": []}], {})
        self._follow()

    def __getattr__(self, name: str) -> Any:
        if "inner" not in vars(self):
            raise AttributeError(name)
        return own_attribute(self.inner, name, self.copy_back)

    def _follow(self) -> None:
        """Use the wrapped optimizer's groups and state."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, cast gradients, update the masters and cast them back; return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, master in self._pairs():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        if self.factor != 1:
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(self.factor)
            self.factor = 1.0
        self.inner.step()
        self.copy_back()
        for _, master in self._pairs():
            master.grad = None
        return loss

    @torch.no_grad()
    def copy_back(self) -> None:
        """Copy the masters, rounded, into the model's parameters."""
        for parameter, master in self._pairs():
            parameter.copy_(master)

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        pairs = zip(self.parameters, self.masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if parameter is not master]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; the masters are not part of it."""
        self.inner.load_state_dict(state_dict)
        self._follow()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add further parameters of the model."""
        if self.param_groups is not self.inner.param_groups:
            return  # torch calls this from its constructor, when the wrapped optimizer already has its groups
        given: Any = param_group["params"]
        parameters: list[Any] = [given] if isinstance(given, Tensor) else [*given]
        masters = [master_of(parameter, self._dtype) for parameter in parameters]
        self.inner.add_param_group({**param_group, "params": masters})
        self.parameters += parameters
        self.masters += masters
