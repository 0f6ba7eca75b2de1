"""Ranks start from the same values: rank 0's, or those of the first rank of a set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.flat.joined_messages import broadcast_together, require_same
from minidist.parallel.guards.claims import BY_DATA_PARALLEL, BY_ZERO, require_free
from minidist.parallel.guards.refusals import refuse_meta
from minidist.parallel.sharding.sets.parameter_set import ParameterSet


def set_for(name: str, sets: Sequence[ParameterSet]) -> ParameterSet:
    """The set that has the parameter, or the buffer, of this name: the first, unless another names it."""
    return next((each for each in sets if each.names is not None and name in each.names), sets[0])


def shared_tensors(
    module: nn.Module, sets: Sequence[ParameterSet]
) -> list[tuple[ParameterSet, list[Tensor]]]:
    """Each set that several ranks share, with its tensors; the first has the buffers. A collective.

    ValueError where the ranks of a set have other ones.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    found = []
    for param_set in sets:
        if param_set.gradient_comm.ranks > 1:
            mine = [(name, tensor) for name, tensor in named if set_for(name, sets) is param_set]
            require_same("parameters and buffers", mine, param_set.gradient_comm.group)
            found.append((param_set, [tensor for _, tensor in mine]))
    return found


def start_equal(module: nn.Module, sets: Sequence[ParameterSet]) -> None:
    """Give a set's ranks the first one's values, and all rank 0's buffers; see `shared_tensors`."""
    for param_set, tensors in shared_tensors(module, sets):
        broadcast_together(tensors, param_set.gradient_comm.group)


def named_in(groups: Iterable[dict[str, Any]]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of an optimizer's groups with their numbers, for a loop without a module."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return [(str(index), parameter) for index, parameter in enumerate(parameters)]


def start_new_equal(named: Sequence[tuple[str, nn.Parameter]], param_set: ParameterSet) -> None:
    """Give parameters that a loop adds to a set rank 0's values, if they may be shared. A collective."""
    for _, parameter in named:
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"params has one of layout {parameter.layout}, which cannot be dealt out; "
                "give dense parameters (their gradients may be sparse)"
            )
    require_free(named, shared_with=[BY_DATA_PARALLEL, BY_ZERO])
    refuse_meta("params", named)
    if param_set.gradient_comm.ranks > 1:
        require_same("parameters", named, param_set.gradient_comm.group)
        broadcast_together([parameter for _, parameter in named], param_set.gradient_comm.group)
