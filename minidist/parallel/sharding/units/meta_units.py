"""Memory and first values for a model that was made on the meta device, unit by unit.

Each module gives values to its own parameters, once, as when the model is made with memory. A tied parameter
gets its values from the first module that holds it; what the other holders would write is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from minidist.parallel.contract.training_state import parameter_like

ParameterSlot = tuple[nn.Module, str]
"""A module and the name of the attribute that holds a parameter."""


class MetaInitializer:
    """Fills the meta parameters and buffers of a model.

    parameters: for each its name and every module and attribute that hold it, in the model's order.
    initialize: fills a module's own parameters; None for its `reset_parameters`. draws: False gives memory
    without values, for values that another rank sends.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter, Sequence[ParameterSlot]]],
        device: torch.device,
        initialize: Callable[[nn.Module], object] | None,
        draws: bool = True,
    ) -> None:
        self._device, self._initialize, self._draws = device, initialize, draws
        self._entries = {id(p): (name, p, slots) for name, p, slots in parameters if p.is_meta}
        self._filled: set[int] = set()  # modules

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace these meta parameters, as the model was made with them, by parameters with values."""
        for parameter in parameters:
            if id(parameter) in self._entries:
                name, _, ((module, _), *_) = self._entries[id(parameter)]
                self._begin(name.rpartition(".")[0], module)

    def fill_buffers(self, module: nn.Module) -> None:
        """Do the same for the meta buffers of modules that `fill` has not reached."""
        for name, part in module.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in part._buffers.values()):
                self._begin(name, part)

    def _begin(self, name: str, part: nn.Module) -> None:
        """Give a module its values, once. A tied parameter takes them from the first module that holds it."""
        if id(part) in self._filled:
            return
        self._filled.add(id(part))
        others: dict[str, nn.Parameter] = {}
        for attribute, parameter in part._parameters.items():
            if parameter is None:
                continue
            _, _, slots = self._entries.get(id(parameter), ("", parameter, ()))
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            fresh = parameter_like(parameter, empty)
            if slots and slots[0] == (part, attribute):
                for holder, each in slots:
                    holder._parameters[each] = fresh
            else:
                others[attribute] = parameter
                part._parameters[attribute] = fresh
        for attribute, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[attribute] = torch.empty_like(buffer, device=self._device)
        self._reset(name, part)
        part._parameters.update(others)

    @torch.no_grad()
    def _reset(self, name: str, part: nn.Module) -> None:
        reset = (
            partial(self._initialize, part) if self._initialize else getattr(part, "reset_parameters", None)
        )
        if not callable(reset):
            raise ValueError(
                f"module is on the meta device, and {name or 'the model'}, a {type(part).__name__}, has no "
                "reset_parameters; give initialize=, a function that fills a module's parameters and buffers"
            )
        if self._draws:
            reset()


def device_for(what: str, module: nn.Module) -> torch.device:
    """The device where meta parameters get memory: where the other parameters lie, or torch's default."""
    devices = {p.device for p in module.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"{what} has parameters on {', '.join(sorted(map(str, devices)))}; move all to one device first"
        )
    device = next(iter(devices), torch.get_default_device())
    return torch.device("cpu") if device.type == "meta" else device
