"""Units: the parts of a model whose parameters are gathered and freed together.

A unit is a submodule, such as a transformer block, with all parameters below it that are in no smaller unit.
The whole model is the root unit and has the rest. A parameter that several units use lies in the smallest
unit around them: its forward pass encloses theirs, so the parameter is gathered for as long as one of them
needs it.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 (FlatParameter; units).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from minidist.comm.work import Group
from minidist.parallel.flat.flat_parameter import FlatParameter, ParameterSlot
from minidist.parallel.sharding.flat_shards import FlatShards
from minidist.parallel.sharding.meta_units import MetaInitializer, device_for
from minidist.parallel.sharding.offload import StorageLocation

Units = Iterable[type[nn.Module] | nn.Module] | None
UnitParameter = tuple[str, nn.Parameter, list[ParameterSlot]]
"""A parameter's first name, the parameter, and every module and attribute that hold it."""


class Unit:
    """A submodule and the parameters that are gathered with it."""

    def __init__(self, name: str, module: nn.Module, number: int) -> None:
        self.name, self.module, self.number = name, module, number  # the root's name is ""
        self.device = torch.device("cpu")  # where it computes
        self.flat_parameters: list[FlatParameter] = []  # for each dtype, for trained and frozen parameters
        self.present = False  # its parameters are gathered, or on their way
        self.shown = False  # the module sees them
        self.calls = 0  # in the running forward pass
        self.first, self.last = -1, -1  # when its calls began and ended, among the events of the pass

    def gather(self, ahead: bool = False) -> None:
        """Launch the all-gathers, unless they were. ahead: while something else computes."""
        if not self.present:
            for flat in self.flat_parameters:
                flat.gather(ahead)
            self.present = True

    def show(self) -> None:
        """Gather the parameters, unless they are there, and let the module see them."""
        self.gather()
        if not self.shown:
            for flat in self.flat_parameters:
                flat.show()
            self.shown = True

    def free(self) -> None:
        """Give the gathered parameters' memory back."""
        if self.present:
            for flat in self.flat_parameters:
                flat.free()
            self.present = self.shown = False

    def __str__(self) -> str:
        return f"the unit {self.name}" if self.name else "the root unit"


def modules_of(module: nn.Module, units: Units) -> list[tuple[str, nn.Module]]:
    """The submodules that are units, with their names, the root first."""
    named = [*module.named_modules()]
    if units is None:
        chosen = {
            id(child)
            for _, part in named
            if isinstance(part, nn.ModuleList | nn.Sequential)
            for child in part.children()
            if not isinstance(child, nn.ModuleList | nn.Sequential)
        }
    else:
        chosen = _asked(units, named)
    rest = [(name, part) for name, part in named if id(part) in chosen and part is not module]
    return [("", module), *((name, part) for name, part in rest if any(True for _ in part.parameters()))]


def _asked(units: Iterable[type[nn.Module] | nn.Module], named: Sequence[tuple[str, nn.Module]]) -> set[int]:
    known, chosen = {id(part) for _, part in named}, set()
    for each in units:
        if isinstance(each, type) and issubclass(each, nn.Module):
            chosen |= {id(part) for _, part in named if isinstance(part, each)}
        elif not isinstance(each, nn.Module):
            raise TypeError(f"units has {each!r}; give classes of modules, or modules of the model")
        elif id(each) not in known:
            raise ValueError(f"units has a {type(each).__name__} that is no part of the model; give its own")
        else:
            chosen.add(id(each))
    return chosen


def divide(module: nn.Module, units: Sequence[Unit]) -> list[tuple[Unit, list[UnitParameter]]]:
    """Deal each parameter to the smallest unit around all modules that have it."""
    by_module = {id(unit.module): unit for unit in units}
    chains: dict[int, list[Unit]] = {}  # for each parameter the units around all its holders
    found: dict[int, UnitParameter] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for attribute, parameter in part._parameters.items():
            if parameter is None:
                continue
            chain = _around(module, path, by_module)
            name = f"{path}.{attribute}" if path else attribute
            slots = found.setdefault(id(parameter), (name, parameter, []))[2]
            if (part, attribute) not in slots:
                slots.append((part, attribute))
            known = chains.setdefault(id(parameter), chain)
            chains[id(parameter)] = [a for a, b in zip(known, chain, strict=False) if a is b]
    dealt: list[tuple[Unit, list[UnitParameter]]] = [(unit, []) for unit in units]
    for key, entry in found.items():
        dealt[chains[key][-1].number][1].append(entry)
    return dealt


def _around(module: nn.Module, path: str, by_module: dict[int, Unit]) -> list[Unit]:
    """The units around a submodule, from the root inwards."""
    chain, part = [by_module[id(module)]], module
    for step in path.split(".") if path else ():
        part = part._modules[step]  # type: ignore[assignment]
        if id(part) in by_module:
            chain.append(by_module[id(part)])
    return chain


def sharing(units: Sequence[Unit], unit: Unit) -> list[Unit]:
    """The units around one, or beside it, that have parameters of it."""
    inside = {id(part) for part in unit.module.modules()}
    needed = {id(parameter) for parameter in unit.module.parameters()}
    return [
        other
        for other in units
        if id(other.module) not in inside
        and any(id(p) in needed for flat in other.flat_parameters for p in flat.parameters)
    ]


def refuse_thawed(units: Iterable[Unit]) -> None:
    """RuntimeError where parameters get gradients that did not when the units were made."""
    for unit in units:
        for flat in unit.flat_parameters:
            if not flat.trained and any(parameter.requires_grad for parameter in flat.parameters):
                raise RuntimeError(
                    f"requires_grad of parameters of {unit} is True, and was False when the FullyShard "
                    "was made, which keeps no gradients of them; thaw parameters before it is made"
                )


def build(
    module: nn.Module,
    units: Units,
    group: Group,
    master: torch.dtype | None,
    initialize: Callable[[nn.Module], object] | None,
    location: StorageLocation,
    group_of: Mapping[str, int],
) -> tuple[list[Unit], list[FlatShards]]:
    """Cut a model into units, and keep this rank's shard of rank 0's parameters; one unit at a time is whole.

    group_of: the number of the optimizer's group for each parameter's name. Returns the units, the root
    first, and their shards: one for each dtype, and for trained and frozen parameters.
    """
    found = [Unit(name, part, i) for i, (name, part) in enumerate(modules_of(module, units))]
    index_of = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    device = device_for("module", module)
    initialize = initialize or getattr(module, "initialize_part", None)

    # The shapes alone decide where each shard will lie; the values come unit by unit.
    kinds: dict[Any, list[FlatParameter]] = {}
    parts = divide(module, found)
    for unit, entries in parts:
        unit.device = device
        groups: dict[Any, list[tuple[int, str, nn.Parameter]]] = {}
        for name, parameter, _ in entries:
            kind = (parameter.dtype, parameter.requires_grad)
            groups.setdefault(kind, []).append((index_of[name], name, parameter))
        for kind, those in groups.items():
            unit.flat_parameters.append(FlatParameter(those, group, device))
            kinds.setdefault(kind, []).append(unit.flat_parameters[-1])
    empty, longest = location.empty_for(device), location.longest
    flat_shards = [FlatShards(flats, group, master, empty, group_of, longest) for flats in kinds.values()]
    initializer = MetaInitializer((entry for _, entries in parts for entry in entries), device, initialize)
    for unit, entries in parts:
        initializer.fill(parameter for _, parameter, _ in entries)
        now = {name: holder._parameters[attribute] for name, _, ((holder, attribute), *_) in entries}
        for flat in unit.flat_parameters:
            flat.take([now[name] for name in flat.names])  # type: ignore[misc]
    initializer.fill_buffers(module)
    return found, flat_shards
