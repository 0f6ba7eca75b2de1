"""The state of a plain optimizer, out of one whose pieces are spread over ranks, and into it.

To bring it to one of them each rank sends one message that says what it has, and one with the bytes of it;
the one puts the parts of each parameter together. To load it each rank takes its parts of the whole.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices

if TYPE_CHECKING:
    from minidist.parallel.sharding.zero import ZeroOptimizer

SliceState = tuple[int, int, int, dict[str, Any]]
"""Place, start and stop of a fragment, and its state."""


def collect(pieces: OptimizerSlices, to: int, group: Group) -> dict[int, dict[str, Any]] | None:
    """Each parameter's state at rank `to` of the group, parts of its shape flat; None on the others.

    A collective. The other ranks send their states' bytes, and a few hundred for what they are.
    """
    own: list[SliceState] = [
        (fragment.place, fragment.start, fragment.stop, own_states(state))
        for _, fragment, _, state in pieces.parts()
        if state
    ]
    if not 0 <= to < len(ranks_of(group)):
        raise ValueError(f"to is {to}; the group's ranks are 0 to {len(ranks_of(group)) - 1}")
    rank = rank_in(group)
    if rank != to:
        _send(own, to, group)
        return None
    entries = list(own)
    for source in range(len(ranks_of(group))):
        if source != to:
            entries += _receive(source, group)
    states: dict[int, dict[str, Any]] = {}
    for place, _, _, state in sorted(entries, key=lambda entry: entry[:2]):
        known = states.setdefault(place, {})
        for key, value in state.items():
            joins = key in known and pieces.is_part(key, value)
            known[key] = torch.cat([known[key], value]) if joins else value
    return states


def own_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with tensors on the CPU that nobody else changes."""
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _send(entries: list[SliceState], to: int, group: Group) -> None:
    tensors: list[Tensor] = []

    def without_values(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return False, value
        tensors.append(value)
        return True, (value.dtype, tuple(value.shape))

    described = [(*entry[:3], {k: without_values(v) for k, v in entry[3].items()}) for entry in entries]
    header = torch.frombuffer(bytearray(pickle.dumps(described)), dtype=torch.uint8)
    data = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors] or [header[:0]])
    comm.send(torch.tensor([len(header), len(data)]), to, group=group)
    comm.send(header, to, group=group)
    comm.send(data, to, group=group)


def _receive(source: int, group: Group) -> list[SliceState]:
    sizes = comm.recv(torch.zeros(2, dtype=torch.int64), source, group=group).tolist()
    header, data = (torch.empty(size, dtype=torch.uint8) for size in sizes)
    comm.recv(header, source, group=group)
    comm.recv(data, source, group=group)
    at = 0

    def with_values(is_tensor: bool, value: Any) -> Any:
        nonlocal at
        if not is_tensor:
            return value
        dtype, shape = value
        tensor = torch.empty(shape, dtype=dtype)
        end = at + tensor.numel() * tensor.element_size()
        tensor.view(-1).view(torch.uint8).copy_(data[at:end])
        at = end
        return tensor

    return [
        (*entry[:3], {k: with_values(*v) for k, v in entry[3].items()})
        for entry in pickle.loads(header.numpy().tobytes())
    ]


def consolidated(optimizer: ZeroOptimizer, to: int) -> dict[str, Any] | None:
    """The state dict of a plain optimizer at rank `to`; None on the others. A collective."""
    partition = optimizer.partition
    states = collect(partition.pieces, to, optimizer.group)
    if states is None:
        return None
    number_of: dict[Tensor, int] = {
        parameter: number for number, parameter in enumerate(_parameters(optimizer))
    }
    whole = {
        number_of[parameter]: own_states(state)  # of parameters that are in no bucket yet
        for parameter, state in optimizer.inner.state.items()
        if parameter in number_of
    }
    for place, state in states.items():
        parameter = partition.trained[place]
        whole[number_of[parameter]] = {
            key: value.view(parameter.shape) if partition.pieces.is_part(key, value) else value
            for key, value in state.items()
        }
    groups = [
        {**group, "params": [number_of[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": dict(sorted(whole.items())), "param_groups": groups}


def load(optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None:
    """See `ZeroOptimizer.load_state_dict`."""
    partition = optimizer.partition
    saved = state_dict["param_groups"]
    have, given = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved))
    if have != given:
        raise ValueError(
            f"state_dict has groups of {given} parameters and the optimizer of {have}; load it into one of "
            "the same groups"
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    partition.follow_changes()
    place_of = {parameter: place for place, parameter in enumerate(partition.trained)}
    numbers = [number for group in saved for number in group["params"]]
    parameter_of = dict(zip(numbers, _parameters(optimizer), strict=True))
    states = {parameter_of[number]: state for number, state in state_dict["state"].items()}
    partition.inner.state.clear()
    partition.masters.clear()
    waiting = {partition.trained[place] for place in partition.waiting}  # for a backward pass, as states do
    partition.inner.state.update({p: dict(state) for p, state in states.items() if p in waiting})
    partition.pieces.take(
        {place_of[p]: state for p, state in states.items() if p in place_of and p not in waiting}
    )


def _parameters(optimizer: ZeroOptimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
