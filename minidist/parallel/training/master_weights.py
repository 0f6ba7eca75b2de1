"""Master weights: the optimizer updates float32 copies of half-precision parameters.

An update is often smaller than half the distance between two neighbouring numbers in half precision: bfloat16
holds 8 bits, so a parameter of 1 stays where it is for any update below 0.002. Summed up in float32 the
updates count, and the model computes with the sum, rounded.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1; the 12 bytes a parameter that the
copies and Adam's two moments take: Rajbhandari et al. 2020, "ZeRO", section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.guards.refusals import require_optimizer


class MasterWeights(torch.optim.Optimizer):
    """An optimizer whose parameters are copies, in another dtype, of those that a model computes with.

    >>> optimizer = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=3e-4))
    >>> loss.backward()
    >>> optimizer.step()

    `step` casts the gradients to the copies' dtype, has the wrapped optimizer update the copies, and casts
    the result back into the parameters. Groups, state and defaults are the wrapped optimizer's, so that
    learning-rate schedulers work and a `state_dict` is one of its own. Between steps it holds, in float32,
    4 bytes for each parameter, and the optimizer's state; while it steps 4 more, the gradients.

    Args:
        parameters: the model's. Those of the masters' dtype, or not floating, are their own masters.
        make: from parameters to the optimizer.
        dtype: of the masters.

    Attributes:
        masters: for each parameter its master, in the order of `parameters`.
        factor: what the next step multiplies the gradients by once they are cast; then it is 1 again.

    Raises:
        ValueError: `make` gave the optimizer other parameters than it was called with.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: MakeOptimizer, dtype: torch.dtype = torch.float32
    ) -> None:
        self.parameters, self._dtype = [*parameters], dtype
        self.masters = [self._master(parameter, dtype) for parameter in self.parameters]
        self.factor = 1.0
        self.inner = make(self.masters)
        require_optimizer(self.inner)
        super().__init__(self.masters or [{"params": []}], {})
        self._follow()
        known = set(map(id, self.masters))
        if any(id(p) not in known for group in self.param_groups for p in group["params"]):
            raise ValueError(
                "optimizer did not take the parameters that it was called with, which are float32 copies of "
                "the model's; give a function of its parameters, such as "
                "functools.partial(torch.optim.AdamW, lr=3e-4)"
            )

    @staticmethod
    def _master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        if not parameter.is_floating_point() or parameter.dtype == dtype:
            return parameter
        return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)

    def _follow(self) -> None:
        """One set of groups and state: the wrapped optimizer's."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the model's parameters."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Cast the gradients, update the masters, cast them back.

        Args:
            closure: computes the loss and its gradients once, first.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, master in self._pairs():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        if self.factor != 1:
            scale(self.gradients(), self.factor)
            self.factor = 1.0
        self.inner.step()
        self.copy_back()
        for _, master in self._pairs():
            master.grad = None
        return loss

    def gradients(self) -> list[Tensor]:
        """Those of the masters, inside a step."""
        return [master.grad for master in self.masters if master.grad is not None]

    @torch.no_grad()
    def copy_back(self) -> None:
        """Have the model's parameters be the masters, rounded."""
        for parameter, master in self._pairs():
            parameter.copy_(master)

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        pairs = zip(self.parameters, self.masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if parameter is not master]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's state; the masters are not part of it."""
        self.inner.load_state_dict(state_dict)
        self._follow()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Further parameters of the model."""
        if self.param_groups is not self.inner.param_groups:
            return  # torch calls it while this object is made; the wrapped optimizer has its groups already
        given: Any = param_group["params"]
        parameters: list[Any] = [given] if isinstance(given, Tensor) else [*given]
        masters = [self._master(parameter, self._dtype) for parameter in parameters]
        self.inner.add_param_group({**param_group, "params": masters})
        self.parameters += parameters
        self.masters += masters


def scale(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply tensors, sparse ones too, in place."""
    for gradient in gradients:
        gradient.mul_(factor)
