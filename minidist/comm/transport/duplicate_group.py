"""Further groups of the same ranks, for messages that must not wait for each other.

NCCL carries out what two ranks of a group send each other in the order in which each of them called it, in
both directions. Two that both send first, or post a receive before a send, then wait for ever; with a
group for each direction they do not. gloo needs none of it: there every message goes by itself.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from minidist.comm.work import Group, limit_of, ranks_of


def duplicate_group(group: Group) -> Group:
    """Make another group of the same ranks in the same order. They all call it, no others.

    Connections are made when they are first used. A group of one is its own twin.
    """
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return group
    whole = group or dist.group.WORLD
    assert whole is not None
    made: Group = dist.new_group(
        list(ranks), timeout=timedelta(seconds=limit_of(whole)), use_local_synchronization=True
    )
    return made
