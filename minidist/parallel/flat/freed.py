"""Freed parameters: those whose values lie in other ranks' shards until the next gather.

A freed parameter keeps its shape, dtype and hooks, and its values are one NaN. A copy of the model, a penalty
on the weights or a norm would become NaN without a word. While it is freed, a parameter is therefore of a
class whose operations raise an error. From `show` to `hide` it is an ordinary parameter, on which operations
cost what they always do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = frozenset(getattr(Tensor, name) for name in ("T", "H", "mT", "mH", "real", "imag"))
"""The attributes that are views of the values. All others say what a parameter is, which stays known."""
_KNOWN = {"__get__", "__set__", "__hash__", "__len__", "size", "numel", "dim", "stride", "element_size"}
_KNOWN |= {"is_floating_point", "is_complex", "is_contiguous", "get_device", "untyped_storage"}
_KNOWN |= {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "detach"}


class FreedParameter(nn.Parameter):
    """A parameter whose values are not on this rank now.

    Attributes:
        name_in_model: for messages.
    """

    name_in_model: str

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """RuntimeError, unless `function` needs no values."""
        name = function.__name__
        if name in _KNOWN and (name != "__get__" or function.__self__ not in _VALUES):
            known: Any = nn.Parameter.__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if name == "detach" or (name == "__get__" and function.__self__ is Tensor.data):
                known = known.as_subclass(cls)  # for the names and shapes of a state_dict
                known.name_in_model = args[0].name_in_model
            return known
        every = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
        found = next((each.name_in_model for each in every if isinstance(each, cls)), "of this model")
        raise RuntimeError(
            f"the parameter {found} has no values now: ZeRO stage 3 gathers a parameter while its unit "
            "computes, and frees it again. Outside a pass read engine.full_state_dict(), or write inside "
            "`with engine.summon() as weights:`, or for a FullyShard inside `with sharded.summon():`; to "
            "average weights take md.EMA, and for a penalty on them the optimizer's weight_decay. If the "
            "model itself reads it, it uses a part or another method of a unit that is never called: leave "
            "that one out of units=. If a loss reads it, let the model's forward return it, or what is "
            "computed with it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """RuntimeError: a file or another process would need the values."""
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        """Its shape, for debuggers and logs, which print what they meet."""
        return f"FreedParameter({self.name_in_model}, {tuple(self.shape)}, {self.dtype})"


def hide(parameters: Sequence[Tensor], hidden: Sequence[Tensor], names: Sequence[str]) -> None:
    """Free parameters; `hidden` are tensors without values of their own that give them their shapes."""
    for parameter, shape, name in zip(parameters, hidden, names, strict=True):
        parameter.data = shape
        if type(parameter) is nn.Parameter:  # not a subclass of somebody else's
            parameter.__class__, parameter.name_in_model = FreedParameter, name  # type: ignore[attr-defined]


def show(parameters: Sequence[Tensor]) -> None:
    """Make freed parameters ordinary ones, before they are given their values."""
    for parameter in parameters:
        if type(parameter) is FreedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def outside(x: Tensor, memory: Sequence[Tensor | None]) -> Tensor:
    """`x`, or a copy of it if it lies in `memory`. A read there after the next free would crash."""
    if x.layout is not torch.strided or x.is_nested:
        return x
    storage = x.untyped_storage()._cdata
    if all(each is None or each.untyped_storage()._cdata != storage for each in memory):
        return x
    return x.clone()
