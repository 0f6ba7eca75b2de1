"""An optimizer's parameter groups, and those of another that updates flat shards in its place.

A function that forms groups looks at parameters, for example at their number of dimensions. So it is given
stand-ins of the parameters' shapes. In the groups that it makes, pieces of the shards then replace the
stand-ins; a piece ends where another group begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from minidist.parallel.contract.training_state import copy_options, parameter_like
from minidist.parallel.guards.refusals import require_optimizer


def steps_on(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether an optimizer has any of these parameters."""
    own = set(map(id, parameters))
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


@contextmanager
def same_options(source: Iterable[dict[str, Any]], target: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Give groups the options of others before what is inside, and take them back after it."""
    copy_options(source, target)
    yield
    copy_options(target, source)


class FlatParameterGroups:
    """The optimizer that `make` makes of the parameters of `module`, which may be on the meta device.

    `optimizer` has stand-ins until slices replace them. `names` are those of each group's parameters, and
    `of` has the group's number for each parameter index; parameters that it leaves out are in no group.
    """

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], module: nn.Module, defaults: Mapping[str, Any]
    ) -> None:
        self._make, self._defaults = make, dict(defaults)
        while isinstance(make, partial):
            make = make.func
        self._is_class = isinstance(make, type)
        stand_ins, known = [], {}
        for name, parameter in module.named_parameters():
            # One element in memory; none for a class, which may begin with state of the parameters' size.
            device = torch.device("meta") if self._is_class else parameter.device
            empty = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            stand_ins.append(parameter_like(parameter, empty))
            known[id(parameter)] = known[id(stand_ins[-1])] = name
        self.optimizer = self._make(stand_ins, **defaults)
        require_optimizer(self.optimizer, "optimizer_class")
        self.names: list[list[str]] = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ValueError(
                        f"optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
                        "module's; make it of the parameters that the function is given"
                    )
            self.names.append([known[id(parameter)] for parameter in group["params"]])
        by_name = {name: number for number, names in enumerate(self.names) for name in names}
        named = enumerate(name for name, _ in module.named_parameters())
        self.of = {index: by_name[name] for index, name in named if name in by_name}
        self._begins_with_state = bool(self.optimizer.state)
        self.optimizer.state.clear()  # of stand-ins

    def begin(self) -> None:
        """Give new pieces in the groups the state that the optimizer begins with, as Adagrad does."""
        if self._begins_with_state:
            known, groups = self.optimizer.state, self.optimizer.param_groups
            known.update(self._made_again([[p for p in g["params"] if p not in known] for g in groups]).state)

    def _made_again(self, groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer of the same class over the pieces."""
        kind = type(self.optimizer)
        given = [
            {**{k: v for k, v in group.items() if k != "param_names"}, "params": own}
            for group, own in zip(self.optimizer.param_groups, groups, strict=True)
        ]
        try:
            if self._is_class:
                made = self._make(given, **self._defaults)
            else:
                takes = inspect.signature(kind).parameters
                made = kind(given, **{k: v for k, v in self.optimizer.defaults.items() if k in takes})
            same = [[*map(id, group["params"])] for group in made.param_groups]
        except (TypeError, ValueError, RuntimeError):
            same = []
        if same != [[*map(id, own)] for own in groups]:
            raise ValueError(
                f"optimizer is a {kind.__name__} that has state before its first step, and stage 3 cannot "
                "make one of parameter groups with flat shards; let it make its state in its first step"
            )
        return made
