"""Whole layers, from which each rank keeps a part: which can be cut, and how all ranks come by the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group

Device = torch.device | str | None


def check_linear(linear: object) -> None:
    """TypeError where a layer does not compute what `torch.nn.Linear` does."""
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise TypeError(f"a {type(linear).__name__} cannot be cut between ranks; give a torch.nn.Linear")


def drawn(
    in_features: int, out_features: int, bias: bool, group: Group, dtype: torch.dtype | None, device: Device
) -> nn.Linear:
    """A whole layer with the weights of the group's first rank."""
    whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
    send_whole(whole, group)
    return whole


def send_whole(module: nn.Module, group: Group) -> None:
    """Copy the parameters and buffers of the group's first rank to all; a collective."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            comm.broadcast(tensor.detach(), group=group)


def part_of(whole: Tensor, index: slice | tuple[slice, ...]) -> nn.Parameter:
    """A parameter of its own: a copy of a part of another."""
    part = whole.detach()[index].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=whole.requires_grad)
