"""Cut a model into units: parts whose parameters are gathered and freed together.

A unit is a submodule, such as a transformer block, with all parameters below it that are in no smaller unit.
The whole model is the root unit and has the rest. A parameter that several units use lies in the smallest
unit around them: its forward pass encloses theirs, so the parameter is gathered for as long as one of them
needs it.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 (units).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import ranks_of
from minidist.parallel.flat.bucket_layout import BucketLayout
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.flat.values import GatheredValues
from minidist.parallel.sharding.optimizer.memory_source import MemorySource
from minidist.parallel.sharding.units.meta_units import MetaInitializer, ParameterSlot, device_for
from minidist.parallel.sharding.units.units import Unit

Units = Iterable[type[nn.Module] | nn.Module] | None
UnitParameter = tuple[str, nn.Parameter, list[ParameterSlot]]
"""A parameter's first name, the parameter, and every module and attribute that hold it."""


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


def deal_to_units(module: nn.Module, units: Sequence[Unit]) -> list[tuple[Unit, list[UnitParameter]]]:
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


def build(
    module: nn.Module,
    units: Units,
    comms: Sequence[GradientComm],
    initialize: Callable[[nn.Module], object] | None,
    memory: MemorySource,
    whole: Collection[int] = (),
) -> list[Unit]:
    """Cut a model into units, the root first, and keep this rank's share of rank 0's parameters.

    One unit at a time is whole. A unit has a bucket for each dtype, for trained and frozen parameters, and
    for parameters that other ranks share; the shards of all units of a kind lie in one tensor. comms: for
    each parameter the ranks that share it. whole: indices of parameters that the optimizer needs whole; they
    come first, so that the others are neighbours.
    """
    found = [Unit(name, part, i) for i, (name, part) in enumerate(modules_of(module, units))]
    names = [name for name, _ in module.named_parameters()]
    index_of = {id(parameter): index for index, parameter in enumerate(module.parameters())}
    device = device_for("module", module)
    initialize = initialize or getattr(module, "initialize_part", None)

    # The shapes alone decide where each shard will lie; the values come unit by unit.
    tensors, parts = [*module.parameters()], deal_to_units(module, found)
    layouts: dict[Unit, list[BucketLayout]] = {}
    kinds: dict[Any, list[BucketLayout]] = defaultdict(list)
    for unit, entries in parts:
        groups: dict[Any, list[int]] = {}
        for _, parameter, _ in entries:
            index = index_of[id(parameter)]
            groups.setdefault((parameter.dtype, parameter.requires_grad, comms[index]), []).append(index)
        layouts[unit] = []
        for kind, indices in groups.items():
            indices.sort(key=lambda index: index not in whole)
            layouts[unit].append(kind[2].layout(indices, tensors))
            kinds[kind].append(layouts[unit][-1])
    kept: dict[BucketLayout, tuple[Tensor, Tensor | None]] = {}  # a shard, and a part of a second copy
    for (dtype, _, over), those in kinds.items():
        sizes, second = [layout.share for layout in those], list[Tensor | None]()
        shards = torch.split(memory.shards(sum(sizes), dtype, device, over), sizes)
        if over.secondary is not None:
            lengths = [layout.length // len(ranks_of(over.secondary)) for layout in those]
            second += torch.split(over.zeros(sum(lengths), dtype, device, over.secondary), lengths)
        kept.update(zip(those, zip(shards, second or [None] * len(those), strict=True), strict=True))
    initializer = MetaInitializer((entry for _, entries in parts for entry in entries), device, initialize)
    for unit, entries in parts:
        initializer.fill(parameter for _, parameter, _ in entries)
        now: dict[int, Any] = {
            index_of[id(parameter)]: holder._parameters[attribute]
            for _, parameter, ((holder, attribute), *_) in entries
        }
        unit.device = device
        for layout in layouts[unit]:
            own, over = [now[index] for index in layout.param_indices], comms[layout.param_indices[0]]
            named = [names[index] for index in layout.param_indices]
            values = GatheredValues(layout, own, over, device, named, *kept[layout])
            unit.buckets.append(Bucket(layout, own, device, values))
    initializer.fill_buffers(module)
    return found
