"""Units: the parts of a model whose parameters are gathered and freed together.

A unit is a submodule, such as a transformer block, with all parameters below it that no smaller unit has. The
whole model is the root unit and has the rest. A parameter that several units use lies in the smallest unit
around them, whose forward pass encloses theirs: it is gathered for as long as one of them needs it.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 (FlatParameter; units).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from minidist.parallel.flat.flat_parameter import FlatParameter, ParameterSlot

Units = Iterable[type[nn.Module] | nn.Module] | None


class Unit:
    """A submodule and the parameters that are gathered with it.

    Attributes:
        name: the submodule's; "" for the root.
        device: where it computes.
        flats: its parameters, those of one dtype that are all trained or all frozen in each.
    """

    def __init__(self, name: str, module: nn.Module, number: int) -> None:
        self.name, self.module, self.number = name, module, number
        self.device = torch.device("cpu")
        self.flats: list[FlatParameter] = []
        self.present = False  # its parameters are gathered, or on their way
        self.shown = False  # the module sees them
        self.calls = 0  # in the running forward pass
        self.first, self.last = -1, -1  # when, among the events of the pass

    def gather(self, ahead: bool = False) -> None:
        """Launch the all-gathers; `show` completes them. ahead: while something else computes."""
        if not self.present:
            for flat in self.flats:
                flat.gather(ahead)
            self.present = True

    def show(self) -> None:
        """Let the module see its gathered parameters."""
        if not self.shown:
            for flat in self.flats:
                flat.show()
            self.shown = True

    def free(self) -> None:
        """Give the gathered parameters' memory back."""
        if self.present:
            for flat in self.flats:
                flat.free()
            self.present = self.shown = False

    def __str__(self) -> str:
        return f"the unit {self.name}" if self.name else "the root unit"


def modules_of(module: nn.Module, units: Units) -> list[tuple[str, nn.Module]]:
    """The submodules that are units, with their names, the root first.

    Raises:
        TypeError: `units` has something else than classes and modules.
        ValueError: it has a module that is no part of the model.
    """
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


def divide(
    module: nn.Module, units: Sequence[Unit]
) -> list[tuple[Unit, list[tuple[str, nn.Parameter, list[ParameterSlot]]]]]:
    """Deal each parameter to the smallest unit around all modules that have it.

    Returns:
        For each unit its parameters: the name, the first where there are several, and every module and
        attribute that hold it.
    """
    by_module = {id(unit.module): unit for unit in units}
    chains: dict[int, list[Unit]] = {}  # for each parameter the units around all its holders
    found: dict[int, tuple[str, nn.Parameter, list[ParameterSlot]]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for attribute, parameter in part._parameters.items():
            if parameter is None:
                continue
            chain = _around(module, path, by_module)
            name = f"{path}.{attribute}" if path else attribute
            places = found.setdefault(id(parameter), (name, parameter, []))[2]
            if (part, attribute) not in places:
                places.append((part, attribute))
            known = chains.setdefault(id(parameter), chain)
            chains[id(parameter)] = [a for a, b in zip(known, chain, strict=False) if a is b]
    dealt: dict[int, list[tuple[str, nn.Parameter, list[ParameterSlot]]]] = {
        unit.number: [] for unit in units
    }
    for key, entry in found.items():
        dealt[chains[key][-1].number].append(entry)
    return [(unit, dealt[unit.number]) for unit in units]


def _around(module: nn.Module, path: str, by_module: dict[int, Unit]) -> list[Unit]:
    """The units around a submodule, from the root inwards."""
    chain, part = [by_module[id(module)]], module
    for step in path.split(".") if path else ():
        part = part._modules[step]  # type: ignore[assignment]
        if id(part) in by_module:
            chain.append(by_module[id(part)])
    return chain
