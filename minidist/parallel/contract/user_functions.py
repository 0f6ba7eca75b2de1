"""The functions that a caller gives an engine: a loss, and one that makes an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

Loss = Callable[..., Any]
"""From outputs and targets to a scalar, their mean over rows, or to a pair (mean, weight). Or one from the
model and a batch to either, whose first argument is called `model`."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to a torch optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`."""
MakeFromNamed = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""From (name, parameter) pairs to a torch optimizer; its first argument is called `named_parameters`."""


def first_argument(function: Any) -> str:
    """The name of a function's first argument; "" if it does not say."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step evaluates the loss itself, perhaps several times: as LBFGS and SAM do."""
    kind: Any = type(getattr(optimizer, "inner", optimizer))  # of a ZeroOptimizer
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def by_parameters(optimizer: Any, model: nn.Module, first: Mapping[str, str]) -> MakeOptimizer:
    """`optimizer` as a function of parameters; one that takes pairs gets their names in `model`.

    first: the first name of each parameter, where the model is a part of one that ties some.
    """
    takes_names = first_argument(optimizer) == "named_parameters"

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given: list[Any] = [*parameters]
        known = set(map(id, given))
        if takes_names:
            names = [first.get(name, name) for name, _ in model.named_parameters()]
            # Masters and shards' stand-ins come in the order of the model's parameters.
            given = [*zip(names, given, strict=True)]
        made: torch.optim.Optimizer = optimizer(given)
        for group in getattr(made, "param_groups", ()):
            group.pop("param_names", None)  # shards replace the parameters, and checkpoints have the names
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ValueError(
                        f"optimizer has a parameter of shape {tuple(parameter.shape)} that is none of those "
                        "that the function is given, so ranks would not share it. If it is the loss's, train "
                        "a module that holds model and loss and returns the loss, with loss=lambda outputs, "
                        "targets: outputs"
                    )
        return made

    return make
