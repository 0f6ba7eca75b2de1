"""The training state of flat shards by the names of parameters, so that every other layout can read it.

A shard begins and ends in the middle of parameters; this rank's elements of one are cut into boxes (see
flat/ranges.py), which are views into the shard, and its optimizer state the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.contract.strategy import TensorBox, cut_chunks
from minidist.parallel.contract.training_state import require_same_groups
from minidist.parallel.sharding.flat_shards import FlatShards
from minidist.parallel.sharding.fully_shard import FullyShard


def shard_chunks(parallel: FullyShard) -> Iterator[TensorBox]:
    """What this rank holds: its boxes of parameters, all buffers, its boxes of the optimizer's state.

    A parameter with several names comes under each of them, as in a state_dict; its optimizer state under the
    first.
    """
    aliases = _aliases(parallel)
    for store in parallel.stores:
        for name, start, stop, low in _parts(store):
            for alias in aliases[name]:
                yield from cut_chunks(f"model.{alias}", parallel.shapes[name], low, store.updated[start:stop])
    for name, value in _buffers(parallel, aliases):
        yield TensorBox(f"model.{name}", tuple(value.shape), (0,) * value.dim(), value)
    given = set()  # numbers of parameters that lie in several pieces
    for store in parallel.stores:
        for piece, (low, high) in zip(store.pieces, store.bounds, strict=True):
            state = parallel.optimizer.state.get(piece, {})
            for name, start, stop, offset in _parts(store):
                begin, end = max(start, low), min(stop, high)
                for key, value in state.items():
                    if begin >= end or not isinstance(value, Tensor):
                        continue
                    full = f"optimizer.{name}.{key}"
                    if value.dim() == 0:
                        if full not in given:
                            given.add(full)
                            yield TensorBox(full, (), (), value)
                    else:
                        part = value[begin - low : end - low]
                        yield from cut_chunks(full, parallel.shapes[name], offset + begin - start, part)


def whole_units(parallel: FullyShard) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under all its names, then the buffers; one unit is gathered at a time."""
    aliases = _aliases(parallel)
    for unit in parallel.units:
        unit.gather()
        unit.show()
        try:
            for flat in unit.flats:
                for name, parameter in zip(flat.names, flat.parameters, strict=True):
                    for alias in aliases[name]:
                        yield alias, parameter.detach()
        finally:
            unit.free()
    yield from _buffers(parallel, aliases)


def _aliases(parallel: FullyShard) -> dict[str, list[str]]:
    """All names of each parameter, under the first."""
    aliases: dict[str, list[str]] = {}
    first = {id(parameter): name for name, parameter in parallel.module.named_parameters()}
    for name, parameter in parallel.module.named_parameters(remove_duplicate=False):
        aliases.setdefault(first[id(parameter)], []).append(name)
    return aliases


def _buffers(parallel: FullyShard, aliases: Mapping[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    """What a state_dict has beside parameters."""
    parameters = {alias for each in aliases.values() for alias in each}
    for name, value in parallel.module.state_dict().items():
        if name not in parameters:
            yield name, value


def shard_gradients(parallel: FullyShard) -> Iterator[tuple[str, Tensor]]:
    """This rank's elements of each parameter's gradient, flat; none of parameters that no rank used."""
    for store in parallel.stores:
        for piece, (low, high) in zip(store.pieces, store.bounds, strict=True):
            for name, start, stop, _ in _parts(store):
                begin, end = max(start, low), min(stop, high)
                if begin < end and piece.grad is not None:
                    yield name, piece.grad[begin - low : end - low]


def _parts(store: FlatShards) -> Iterator[tuple[str, int, int, int]]:
    """This rank's part of each parameter: its name, start and stop in the long tensor, its first element."""
    for name, (start, stop), low in zip(store.names, store.spans, store.starts, strict=True):
        yield name, start, stop, low


def pieces_settings(parallel: FullyShard) -> dict[str, Any]:
    """The optimizer's groups with the names of parameters, and what of its state is no tensor."""
    state: dict[str, dict[str, Any]] = {}
    for store in parallel.stores:
        for piece, (low, high) in zip(store.pieces, store.bounds, strict=True):
            values = parallel.optimizer.state.get(piece, {})
            others = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            if others:
                state |= {
                    name: others for name, start, stop, _ in _parts(store) if start < high and low < stop
                }
    pairs = zip(parallel.optimizer.param_groups, parallel.groups.names, strict=True)
    return {"groups": [{**group, "params": [*names]} for group, names in pairs], "state": state}


def load_pieces(
    parallel: FullyShard, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Take the groups of `settings`, and have empty optimizer state for each parameter by itself.

    Args:
        parallel: what is loaded.
        settings: as `pieces_settings` gives them, or another strategy.
        state: for each name the keys of its optimizer state, each with shape and dtype.

    Raises:
        ValueError: other groups than the settings'.
    """
    optimizer = parallel.optimizer
    require_same_groups(parallel.groups.names, settings)
    for group, values in zip(optimizer.param_groups, settings["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    optimizer.state.clear()
    for store in parallel.stores:
        if not store.trained:
            continue
        store.cut_everywhere(optimizer)
        long: dict[tuple[str, torch.dtype], Tensor] = {}
        for name, start, stop, _ in _parts(store):
            numbers: dict[str, Any] = dict(settings["state"].get(name, {}))
            for key, (shape, dtype) in state.get(name, {}).items():
                if not shape and parallel.shapes[name]:
                    numbers[key] = torch.zeros((), dtype=dtype)  # of all pieces, until `merge_pieces`
                elif (key, dtype) not in long:
                    long[key, dtype] = parallel.place.like(store.updated, dtype)
            for piece, (low, high) in store.within(start, stop):
                values = dict(numbers)
                for key, (_, dtype) in state.get(name, {}).items():
                    if key not in numbers:
                        values[key] = long[key, dtype][low:high]
                if values:
                    optimizer.state[piece] = values


def merge_pieces(parallel: FullyShard) -> None:
    """Long pieces again, where neighbours' state agrees in all that is not elementwise."""
    for values in parallel.optimizer.state.values():
        values.update({k: v.clone() for k, v in values.items() if isinstance(v, Tensor) and not v.dim()})
    for store in parallel.stores:
        store.merge(parallel.optimizer)
