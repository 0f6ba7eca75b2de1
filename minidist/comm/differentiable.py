"""Collectives that autograd can follow: the gradients travel back the way that the values came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minidist.comm.collectives import all_to_all
from minidist.comm.work import Group


class _Exchange(torch.autograd.Function):
    """Forward: all-to-all. Backward: the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outgoing: list[int], incoming: list[int], group: Group) -> Tensor:
        ctx.outgoing, ctx.incoming, ctx.group = outgoing, incoming, group
        return all_to_all(x, outgoing, incoming, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(gradient, ctx.incoming, ctx.outgoing, ctx.group), None, None, None


def exchange_rows(x: Tensor, outgoing: list[int], incoming: list[int], group: Group = None) -> Tensor:
    """Send outgoing[r] rows of `x` to rank r, for rank 0 first, and return the incoming[r] rows of each.

    Forward: an all-to-all; a rank sends the rows that go to other ranks. Backward: the gradients go back, in
    as many bytes as the rows that came. All ranks of the group call it, and all or none of them go backward
    through it. It can be differentiated any number of times. Errors: those of `comm.all_to_all`.
    """
    arrived: Tensor = _Exchange.apply(x, outgoing, incoming, group)  # type: ignore[no-untyped-call]
    return arrived
