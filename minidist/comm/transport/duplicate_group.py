"""More groups of the same ranks, for messages that must not wait for each other.

Over NCCL, two ranks of a group exchange all their messages in the order in which each of them made its calls.
If both send first, or one posts a receive before a send, they wait for ever. With a group for each direction
they do not. gloo needs none: there each message travels by itself.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from minidist.comm.work import Group, limit_of, ranks_of


def duplicate_group(group: Group) -> Group:
    """Make another group of the same ranks in the same order. All of them call it, and no others.

    Connections are made when they are first used. A group of one rank is returned as it is.
    """
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return group
    limit = timedelta(seconds=limit_of(group))
    made: Group = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)
    return made
