"""The state of a plain optimizer, collected from slices that are spread over ranks, and dealt to them again.

To collect the state on one rank, every other rank sends it the parts that it owns, and that rank joins the
parts of each parameter. To load a state, each rank takes its parts of the whole.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist._arguments import is_whole
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.contract.training_state import copy_options
from minidist.parallel.sharding.optimizer.optimizer_slices import has_elements
from minidist.parallel.sharding.whole.whole_parameters import WithSharedState

RangeState = tuple[int, int, dict[str, Any]]
"""A parameter index, the first element of a range of that parameter, and the range's state."""


class ConsolidatedState:
    """The state of a plain optimizer of all parameters, on the rank that it was last collected at."""

    def __init__(self, shared: WithSharedState) -> None:
        self._shared = shared
        self._collected: dict[str, Any] | None = None

    def forget(self) -> None:
        """The state changes: what was collected is no longer it."""
        self._collected = None

    def collect(self, to: int = 0) -> None:
        """Collect the whole state at rank `to` of the group: the others send their shares. A collective."""
        if not is_whole(to):
            raise TypeError(f"to is {to!r}; give a rank of the group, such as 0")
        shared, states = self._shared, _collect(self._shared, to)
        self.forget()
        if states is None:
            return
        number_of: dict[Tensor, int] = {p: number for number, p in enumerate(_in_groups(shared))}
        whole = {
            number_of[parameter]: _copied(state)  # of parameters that are in no bucket yet
            for parameter, state in shared.slices.optimizer.state.items()
            if parameter in number_of
        }
        for param_index, state in states.items():
            parameter = shared.parameters[param_index]
            whole[number_of[parameter]] = {
                key: value.view(parameter.shape) if is_cut(shared, param_index, key, value) else value
                for key, value in state.items()
            }
        groups = [{**group, "params": [number_of[p] for p in group["params"]]} for group in shared.groups]
        self._collected = {"state": dict(sorted(whole.items())), "param_groups": groups}

    def read(self) -> dict[str, Any]:
        """The state of a plain optimizer of all parameters, after `consolidate_state_dict` to this rank."""
        if self._collected is None:
            raise RuntimeError(
                f"the state is spread over {self._shared.sets[0].gradient_comm.ranks} ranks; let every rank "
                "call consolidate_state_dict(to) first, and rank `to` state_dict()"
            )
        return self._collected

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a plain optimizer, or a consolidated one, of the same parameters. A collective.

        state_dict: the same on all ranks; it may come from another number of ranks.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            has = f"has the keys {[*state_dict]}" if isinstance(state_dict, Mapping) else f"is {state_dict!r}"
            raise TypeError(
                f"state_dict {has}; give what an optimizer's state_dict() returned, with the keys state and "
                "param_groups"
            )
        shared = self._shared
        shared.follow_changes()
        saved = state_dict["param_groups"]
        have, given = ([len(group["params"]) for group in groups] for groups in (shared.groups, saved))
        if have != given:
            raise ValueError(
                f"state_dict has groups of {given} parameters and the optimizer of {have}; load it into one "
                "of the same groups"
            )
        copy_options(saved, shared.groups)
        numbers = [number for group in saved for number in group["params"]]
        parameter_of = dict(zip(numbers, _in_groups(shared), strict=True))
        states = {parameter_of[number]: state for number, state in state_dict["state"].items()}
        shared.slices.optimizer.state.clear()
        shared.slices.load_whole_states(
            {i: states[parameter] for i, parameter in enumerate(shared.parameters) if parameter in states}
        )
        for parameter in states.keys() - {*shared.parameters}:  # frozen: whole until they are dealt
            shared.slices.optimizer.state[parameter] = dict(states[parameter])
        self.forget()


def is_cut(shared: WithSharedState, param_index: int, key: str, value: Any) -> bool:
    """Whether ranks have parts of the state under `key` of a parameter."""
    parameter = shared.parameters[param_index]
    group = next(i for i, group in enumerate(shared.groups) if any(p is parameter for p in group["params"]))
    return shared.slices.may_cut(group) and has_elements(key, value)


def _in_groups(shared: WithSharedState) -> list[nn.Parameter]:
    """The whole parameters, as the groups number them."""
    return [parameter for group in shared.groups for parameter in group["params"]]


def _collect(shared: WithSharedState, to: int) -> dict[int, dict[str, Any]] | None:
    """Each parameter's state at rank `to`, with cut tensors flat; None on the others. A collective.

    The other ranks send the bytes of their states, and some for each tensor's description.
    """
    over = shared.sets[0].gradient_comm
    ranks, group = ranks_of(over.group), over.share_group
    if not 0 <= to < len(ranks):
        raise ValueError(f"to is {to}; the group's ranks are 0 to {len(ranks) - 1}")
    here = ranks_of(group)
    if ranks[to] not in here:  # they have a copy of their own
        return None
    to, count = here.index(ranks[to]), len(here)
    entries: list[RangeState] = [
        (span.param_index, span.start, _copied(state))
        for each, span, _, state in shared.slices.by_parameter()
        if state and each.bucket is not None
    ]
    if rank_in(group) != to:
        _send(entries, to, group)
        return None
    for source in range(count):
        if source != to:
            entries += _receive(source, group)
    states: dict[int, dict[str, Any]] = {}
    for param_index, _, state in sorted(entries, key=lambda entry: entry[:2]):
        known = states.setdefault(param_index, {})
        for key, value in state.items():
            joins = key in known and is_cut(shared, param_index, key, value)
            known[key] = torch.cat([known[key], value]) if joins else value
    return states


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose tensors are copies on the CPU."""
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _send(entries: list[RangeState], to: int, group: Group) -> None:
    buffer = io.BytesIO()
    torch.save(entries, buffer)
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    comm.send(torch.tensor([len(data)]), to, group=group)
    comm.send(data, to, group=group)


def _receive(source: int, group: Group) -> list[RangeState]:
    size = comm.recv(torch.zeros(1, dtype=torch.int64), source, group=group)
    data = comm.recv(torch.empty(int(size), dtype=torch.uint8), source, group=group)
    entries: list[RangeState] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=False)
    return entries
