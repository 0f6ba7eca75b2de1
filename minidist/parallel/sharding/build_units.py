"""From a model to units and shards, unit by unit, so that no more than one unit is whole at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from minidist.comm.work import Group
from minidist.parallel.flat.flat_parameter import FlatParameter
from minidist.parallel.sharding.flat_shards import FlatShards
from minidist.parallel.sharding.meta_units import MetaInitializer, device_for
from minidist.parallel.sharding.offload import StorageLocation
from minidist.parallel.sharding.units import Unit, Units, divide, modules_of


def build(
    module: nn.Module,
    units: Units,
    group: Group,
    master: torch.dtype | None,
    initialize: Callable[[nn.Module], object] | None,
    place: StorageLocation,
    group_of: Mapping[str, int],
) -> tuple[list[Unit], list[FlatShards]]:
    """Cut a model into units, and keep this rank's shard of rank 0's parameters.

    group_of: the number of the optimizer's group for each name.

    Returns:
        The units, the root first, and the stores of their shards, one for each dtype and for trained and
        frozen parameters.
    """
    found = [Unit(name, part, i) for i, (name, part) in enumerate(modules_of(module, units))]
    numbers = {name: number for number, name in enumerate(name for name, _ in module.named_parameters())}
    device = device_for("module", module)
    initialize = initialize or getattr(module, "initialize_part", None)

    # Where each shard will lie follows from the shapes alone; the values come unit by unit.
    kinds: dict[Any, list[FlatParameter]] = {}
    parts = divide(module, found)
    for unit, entries in parts:
        unit.device = device
        groups: dict[Any, list[tuple[int, str, nn.Parameter]]] = {}
        for name, parameter, _ in entries:
            kind = (parameter.dtype, parameter.requires_grad)
            groups.setdefault(kind, []).append((numbers[name], name, parameter))
        for kind, those in groups.items():
            unit.flats.append(FlatParameter(those, group, device))
            kinds.setdefault(kind, []).append(unit.flats[-1])
    empty, longest = place.empty_for(device), place.longest
    stores = [FlatShards(flats, group, master, empty, group_of, longest) for flats in kinds.values()]
    beginning = MetaInitializer((entry for _, entries in parts for entry in entries), device, initialize)
    for unit, entries in parts:
        beginning.fill(parameter for _, parameter, _ in entries)
        now = {name: holder._parameters[attribute] for name, _, ((holder, attribute), *_) in entries}
        for flat in unit.flats:
            flat.take([now[name] for name in flat.names])  # type: ignore[misc]
    beginning.fill_buffers(module)
    return found, stores
