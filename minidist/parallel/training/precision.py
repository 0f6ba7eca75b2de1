"""Mixed precision: parameters, activations and gradients in 16 bits, the optimizer in 32.

The model computes with and sends two bytes instead of four. bfloat16 has float32's range and 8 bits. float16
has 11 bits, but underflows below 6e-8, where many gradients are. So the loss is multiplied by a large scale
before the backward pass, and the gradients are divided by it in float32. The scale is found by trial: if a
gradient overflows, it is halved and the step skipped; after many steps without overflow it is doubled.

| In 16 bits | In float32 |
|---|---|
| parameters, gradients, activations, floating inputs and buffers | master weights, the optimizer's state |
| | the loss; BatchNorm and InstanceNorm with running statistics, their parameters too |
| | the biases of a router of experts, which move by steps that 16 bits would lose |

Source: Micikevicius et al. 2018, "Mixed Precision Training", sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from minidist.model.mixture_of_experts import Router
from minidist.parallel.contract.batch import mapped
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.training.fp8 import Fp8, linears_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LossScale:
    """How the factor on the loss follows the gradients. Raises ValueError if a number is out of range."""

    start: float = 2.0**16
    good_steps: int = 2000  # consecutive steps without overflow after which it is doubled
    smallest: float = 1.0  # an overflow at this scale is an error: the loss itself diverges

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= self.start < math.inf:
            raise ValueError(
                f"a loss scale cannot start at {self.start} and be at least {self.smallest}; give "
                "0 < smallest <= start"
            )
        if self.good_steps < 1:
            raise ValueError(f"good_steps is {self.good_steps}; give at least 1")


class Precision:
    """The engine's conversions for the layout's precision: "fp32" converts nothing, a kind of FP8 rounds."""

    def __init__(self, name: str, loss_scale: LossScale | None = None) -> None:
        if loss_scale is not None and name != "fp16":
            raise ValueError(
                f"loss_scale is for precision='fp16', but the layout has precision={name!r}; leave it out"
            )
        self.name = name
        self.dtype = DTYPES.get(name)  # the model computes in it; None for its parameters' own
        self.master = None if self.dtype is None else torch.float32  # the optimizer updates in it
        self.scales = name == "fp16"
        self.rule = loss_scale or LossScale()
        self.scale = self.rule.start if self.scales else 1.0  # the next step's loss is multiplied by this
        self.skipped = 0  # steps, because a gradient was not finite
        self._good = 0  # steps since the scale changed
        self.fp8: Fp8 | None = None  # what rounds the products, once a model is known

    def convert(self, model: nn.Module) -> dict[str, Tensor]:
        """Make `model` compute in 16 bits; its parameters stay the same objects.

        Returns the float32 values, by name, of the parameters that were converted and are not on the meta
        device: `prepare` lets the masters start from them. Raises ValueError if a floating parameter is
        not float32.
        """
        if self.name in FP8_RECIPES:
            self.fp8 = Fp8(FP8_RECIPES[self.name], linears_of(model))
        if self.dtype is None:
            return {}
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise ValueError(
                    f"precision={self.name!r} starts from a float32 model, and {name} is {parameter.dtype}; "
                    "call model.float() first, or train with precision='fp32', in the parameters' own dtype"
                )
        exact = {
            name: parameter.detach()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.is_floating_point() and not parameter.is_meta
        }
        for module in model.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                continue  # torch computes these from 16-bit inputs with float32 statistics and parameters
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    parameter.data, parameter.grad = parameter.data.to(self.dtype), None
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and not isinstance(module, Router):
                    module._buffers[name] = buffer.to(self.dtype)
        converted = dict(model.named_parameters(remove_duplicate=False))
        return {name: value for name, value in exact.items() if converted[name].dtype == self.dtype}

    def inputs(self, inputs: Any) -> Any:
        """Convert the floating tensors of a batch to the model's dtype."""
        if self.dtype is None:
            return inputs
        return mapped(lambda x: x.to(self.dtype) if x.is_floating_point() else x, inputs)

    def outputs(self, outputs: Any) -> Any:
        """Convert outputs in 16 bits to float32, as the loss takes them."""
        if self.dtype is None:
            return outputs
        return mapped(lambda x: x.float() if x.dtype == self.dtype else x, outputs)

    def convert_calls(self, model: nn.Module) -> None:
        """Have a model convert its inputs and outputs itself, where no executor does it."""
        if self.dtype is not None:
            model.register_forward_pre_hook(lambda _, args, kw: self.inputs((args, kw)), with_kwargs=True)
            model.register_forward_hook(lambda _, args, outputs: self.outputs(outputs))

    def skips(self, norm: float) -> bool:
        """Update the scale for gradients of this norm, and return whether to skip the step."""
        if not self.scales:
            return False
        if math.isfinite(norm):
            self._good += 1
            if self._good == self.rule.good_steps:
                self.scale, self._good = self.scale * 2, 0
            return False
        if self.scale / 2 < self.rule.smallest:
            raise FloatingPointError(
                f"a gradient is not finite although the loss scale is {self.scale:g}, the smallest; look for "
                "infinities in the data, give a smaller learning rate, or train with precision='bf16'"
            )
        self.scale, self._good = self.scale / 2, 0
        self.skipped += 1
        return True

    def settings(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        scale = self.scale if self.scales else None
        found = {"scale": scale, "good": self._good, "skipped": self.skipped}
        return found if self.fp8 is None else {**found, "fp8": self.fp8.settings()}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Resume from saved settings. If the precision has changed to fp16, the scale starts afresh."""
        self.skipped = settings["skipped"]
        if self.fp8 is not None:
            self.fp8.load_settings(settings.get("fp8", {}))
        if self.scales and settings["scale"] is not None:
            self.scale, self._good = settings["scale"], settings["good"]
