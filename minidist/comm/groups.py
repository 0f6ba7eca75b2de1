"""Process groups: their members, and what this process has made for each of them.

A group is one of torch.distributed's, or None for the whole world. `known` gives its record, in which other
files keep what they make once for a group: its shared memory, the thread that runs its collectives.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
"""A process group of torch.distributed; None is the whole world."""


class Known:
    """What this process knows of a group. It holds no group: one that was destroyed must not stay alive."""

    def __init__(self, ranks: tuple[int, ...], own: int, name: str = "") -> None:
        self.ranks, self.own = ranks, own  # the members, as ranks of the world; this rank's number among them
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.number = int.from_bytes(digest, "little", signed=True)  # of the group, the same on all its ranks
        self.memory: Any = None  # `transport.shared_memory.GroupMemory`, from its first call on
        self.background: Any = None  # `call_queue.Background`, which runs its collectives
        self.subgroups = WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]()  # of `Mesh`, by members


# A dictionary of its own, since a lookup in a `weakref.WeakKeyDictionary` takes four times as long, and every
# call makes several. torch takes microseconds for each answer that a record has.
_known: dict[int, Known] = {}
_ALONE = Known((0,), 0)
is_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """Inside, every group has this rank alone, as in a single process: collectives move nothing."""
    global is_alone
    is_alone = True
    try:
        yield
    finally:
        is_alone = False


def known(group: Group) -> Known:
    """Return the record of a group; that of a single process where there is no world.

    Raises:
        TypeError: it is not a group.
        ValueError: this rank is not a member.
    """
    if is_alone:
        return _ALONE
    if group is None:
        group = dist.group.WORLD
        if group is None:  # there is no world
            return _ALONE
    found = _known.get(id(group))
    if found is None:
        if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                f"group is {group!r}; give a process group, such as a Mesh's group('dp'), or None for all "
                "ranks"
            )
        own = dist.get_rank(group)
        if own < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the group; only members may call its collectives"
            )
        found = _known[id(group)] = Known(tuple(dist.get_process_group_ranks(group)), own, group.group_name)
        # The group's id may name another object only after this has run.
        weakref.finalize(group, _forget, id(group)).atexit = False
    return found


def _forget(key: int) -> None:
    found = _known.pop(key, None)
    if found is not None and found.background is not None:
        found.background.stop()


def forget() -> None:
    """Forget all groups, because their world has ended."""
    for key in [*_known]:
        _forget(key)


def ranks_of(group: Group) -> tuple[int, ...]:
    """Return the members of a group, as ranks of the world; (0,) where there is no world. Errors: `known`."""
    return known(group).ranks


def rank_in(group: Group) -> int:
    """Return this rank's number in a group, from 0. Errors: those of `known`."""
    return known(group).own


def process_group(group: Group) -> dist.ProcessGroup:
    """Return the group itself, or the world's where it is None."""
    group = group or dist.group.WORLD
    assert group is not None
    return group


def limit_of(group: Group) -> float:
    """Return the seconds that a call waits: the least of the group's and the world's limits.

    The world's counts because torch gives a new group 30 minutes.
    """
    groups, cpu = {process_group(group), process_group(None)}, [torch.device("cpu")]  # a dry run's names none
    limits = (one._get_backend(each).options._timeout for one in groups for each in one._device_types or cpu)
    return float(min(limits).total_seconds())
