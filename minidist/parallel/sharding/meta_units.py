"""Memory and first values for a model that was made on the meta device, unit by unit.

Modules give their own parameters values, each once, as they would where the model is made with memory. A tied
parameter has those of its first holder; what the others would give it goes to memory that is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from minidist.parallel.flat.flat_parameter import ParameterSlot


class MetaInitializer:
    """Fills the meta parameters and buffers of a model.

    Args:
        parameters: for each its name and every module and attribute that hold it, in the model's order.
        device: of the memory.
        initialize: fills a module's own parameters; None for its `reset_parameters`.
        draws: whether to; False gives memory alone, for values that another rank sends.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter, Sequence[ParameterSlot]]],
        device: torch.device,
        initialize: Callable[[nn.Module], object] | None,
        draws: bool = True,
    ) -> None:
        self._device, self._initialize, self._draws = device, initialize, draws
        self._entries = {id(p): (name, p, places) for name, p, places in parameters if p.is_meta}
        self._filled: set[int] = set()  # modules

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have these, as the model was made with them, be parameters with values.

        Raises:
            ValueError: nothing says how a module's parameters begin.
        """
        for parameter in parameters:
            if id(parameter) in self._entries:
                name, _, ((module, _), *_) = self._entries[id(parameter)]
                self._begin(name.rpartition(".")[0], module)

    def fill_buffers(self, module: nn.Module) -> None:
        """The same for meta buffers, of modules that no parameter brought up."""
        for name, part in module.named_modules():
            if any(buffer is not None and buffer.is_meta for buffer in part._buffers.values()):
                self._begin(name, part)

    def _begin(self, name: str, part: nn.Module) -> None:
        """Give a module its values, once: for all parameters of which it is the first holder."""
        if id(part) in self._filled:
            return
        self._filled.add(id(part))
        others: dict[str, nn.Parameter] = {}
        for attribute, parameter in part._parameters.items():
            if parameter is None:
                continue
            _, _, places = self._entries.get(id(parameter), ("", parameter, ()))
            fresh = self._empty(parameter)
            if places and places[0] == (part, attribute):
                for holder, each in places:
                    holder._parameters[each] = fresh
            else:
                others[attribute] = parameter
                part._parameters[attribute] = fresh
        for attribute, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[attribute] = torch.empty_like(buffer, device=self._device)
        self._reset(name, part)
        part._parameters.update(others)

    def _empty(self, like: Tensor) -> nn.Parameter:
        empty = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return nn.Parameter(empty, requires_grad=like.requires_grad)

    @torch.no_grad()
    def _reset(self, name: str, part: nn.Module) -> None:
        reset = getattr(part, "reset_parameters", None)
        if self._initialize is None and not callable(reset):
            raise ValueError(
                f"module is on the meta device, and {name or 'the model'}, a {type(part).__name__}, has no "
                "reset_parameters; give initialize=, a function that fills a module's parameters and buffers"
            )
        if not self._draws:
            return
        if self._initialize is not None:
            self._initialize(part)
        else:
            reset()  # type: ignore[misc]


def device_for(what: str, module: nn.Module) -> torch.device:
    """Where parameters get memory that have none: where the others are, or else torch's default.

    Raises:
        ValueError: the others are on several devices.
    """
    devices = {p.device for p in module.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"{what} has parameters on {', '.join(sorted(map(str, devices)))}; move all to one device first"
        )
    device = next(iter(devices), torch.get_default_device())
    return torch.device("cpu") if device.type == "meta" else device
