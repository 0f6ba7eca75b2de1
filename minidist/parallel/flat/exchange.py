"""Pieces of tensors travel between ranks in one message: those of one matrix to its owner, say, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, ranks_of

Pieces = Sequence[Sequence[Tensor]]
"""For each rank of a group, views of what it gets from this one, or of where its own lies here."""


@torch.no_grad()
def exchange(sent: Pieces, received: Pieces, like: Tensor, group: Group) -> None:
    """Send each rank its pieces in `sent`, and write what comes from it to those in `received`.

    A collective: an all-to-all, which sends all pieces but this rank's own. like: has the message's dtype and
    device.
    """
    outgoing, incoming = ([sum(x.numel() for x in each) for each in pieces] for pieces in (sent, received))
    flat = torch.cat([like.new_empty(0), *(x.reshape(-1).to(like) for each in sent for x in each)])
    if len(ranks_of(group)) > 1:
        flat = comm.all_to_all(flat, outgoing, incoming, group=group)
    into = [view for each in received for view in each]
    for view, values in zip(into, torch.split(flat, [view.numel() for view in into]), strict=True):
        view.copy_(values.view(view.shape))
