"""Choose how a collective runs: by torch.distributed, in shared memory, or as an algorithm of messages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from minidist._names import unknown
from minidist.comm import checking
from minidist.comm.algorithms import registry
from minidist.comm.arguments import refusal
from minidist.comm.failures import described, failed
from minidist.comm.group_table import GroupTable
from minidist.comm.transport.background_thread import Background
from minidist.comm.transport.shared_memory import Failed, SharedMemory
from minidist.comm.work import Group, call_of, forget_groups, limit_of, process_group, ranks_of

_OF_MESSAGES = {**registry.ALGORITHMS, "barrier": {}, "send": {}}
ALGORITHMS = {operation: ("torch", "shared_memory", *names) for operation, names in _OF_MESSAGES.items()}
"""The names that each operation's `algorithm` takes, besides "auto". `send` and `recv` take none, and follow
`using` alone."""

_preferred: list[str] = []
"""The algorithms that `using` names, the innermost last. Not a context variable: backward passes run in other
threads."""


class GroupMemory(NamedTuple):
    """The shared memory of a group, kept between calls."""

    memory: SharedMemory | None  # of the group's ranks on this host; None if they cannot share any
    why_not: str  # why the whole group cannot use it; empty if it can


_memories: GroupTable[GroupMemory] = GroupTable()
_backgrounds: GroupTable[Background] = GroupTable()


@contextmanager
def using(algorithm: str) -> Iterator[None]:
    """Run every collective inside by this algorithm, including those of strategies.

    A collective that names an algorithm itself keeps it, and an operation that lacks this algorithm runs as
    before. All ranks of a group have to use the same algorithm.

    >>> with comm.using("ring"):
    ...     engine.step(inputs, targets)

    Raises:
        ValueError: no operation has an algorithm of that name.
    """
    known = sorted({name for names in ALGORITHMS.values() for name in names})
    if algorithm not in known:
        raise unknown("algorithm", algorithm, known)
    _preferred.append(algorithm)
    try:
        yield
    finally:
        _preferred.remove(algorithm)


def choose(
    operation: str, algorithm: str, group: Group, x: torch.Tensor, async_op: bool, op: str = ""
) -> str:
    """Return the algorithm of a call, the same on all ranks.

    A group's first call in shared memory waits for all its ranks, to make the memory. An asynchronous call
    must not wait, so before the first synchronous call "auto" is "torch" for asynchronous ones; or "ring" if
    torch cannot reduce this dtype by `op`. x is the call's tensor, or any other on its device. Raises
    ValueError if the algorithm is unknown, or it is "shared_memory" and the group has none.
    """
    known = ALGORITHMS[operation]
    if algorithm not in known and algorithm != "auto":
        raise unknown(f"algorithm of {operation}", algorithm, ("auto", *known))
    if len(ranks_of(group)) == 1:
        return "torch"
    how = _available(operation, algorithm, group, x, async_op)
    return "ring" if how == "torch" and op and refusal(operation, op, x.dtype, how) else how


def _available(operation: str, algorithm: str, group: Group, x: torch.Tensor, async_op: bool) -> str:
    """Return the algorithm to use: shared memory where it is there, unless another was asked for."""
    asked = algorithm != "auto"
    if not asked:
        algorithm = preferred(operation)
    if algorithm != "shared_memory":
        return algorithm
    reason = f"its tensor is on {x.device}"
    if x.device.type == "cpu":
        what = f"{operation} of {described(x)}"
        known_memory = process_group(group) in _memories
        if not asked and async_op and not known_memory:
            return "torch"
        if not known_memory:  # making it is a collective, which the ranks' other calls must not mix with
            check = checking.enter(call_of(operation, algorithm, x, group))
            if check is not None:
                check()
        reason = group_memory(group, what).why_not
    if not reason:
        return algorithm
    if not asked:
        return "torch"
    raise ValueError(f"{operation} cannot go through shared memory: {reason}; give algorithm='auto'")


def preferred(operation: str) -> str:
    """Return the algorithm that "auto" tries first."""
    known = ALGORITHMS[operation]
    return next((name for name in reversed(_preferred) if name in known), "shared_memory")


def group_memory(group: Group, what: str = "a collective") -> GroupMemory:
    """Return a group's shared memory. The group's first call, `what` in errors, makes it: a collective."""
    group = process_group(group)
    found = _memories.get(group)
    if found is None:
        memory, why_not = None, ""
        try:
            # The group of a dry run, which only counts bytes, has memory and a background of its own.
            own = getattr(group, "shared_memory", None)
            memory = SharedMemory(group, limit_of(group)) if own is None else own()
        except Failed as error:
            why_not = str(error)
        except RuntimeError as error:
            raise failed(what, ranks_of(group), error) from error
        if memory is not None and len(memory.hosts) > 1:
            why_not = f"the ranks are on {len(memory.hosts)} hosts"
        found = _memories.put(group, GroupMemory(memory, why_not))
    return found


def empty_shared(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, group: Group = None
) -> torch.Tensor:
    """Make a tensor of zeros that collectives read and write in place. A collective.

    It lies in memory that all CPU ranks of this host map. Collectives of the group on it, or on contiguous
    slices that begin at the same offset on all ranks, need no copies through buffers. After a collective its
    values belong to this rank: no other rank changes them before the next one. The memory is freed with the
    last tensor in it. Where ranks can't share memory, it is an ordinary tensor.

    Args:
        shape: the same on all ranks.
        dtype: the same on all ranks.
        group: whose ranks share it; None for all.

    Raises:
        CollectiveError: a peer is gone or late.
    """
    size = tuple(shape)
    memory = group_memory(group).memory if len(ranks_of(group)) > 1 else None
    try:
        shared = memory.empty(size, dtype) if memory is not None else None
    except RuntimeError as error:
        raise failed("empty_shared", ranks_of(group), error) from error
    return torch.zeros(size, dtype=dtype) if shared is None else shared


def background(group: Group) -> Background:
    """Return the thread that runs a group's collectives in the order of their calls, except torch's own.

    There is one for all algorithms, since the hierarchical all-reduce sends messages as well: two collectives
    at once would mix them up.
    """
    group = process_group(group)
    found = _backgrounds.get(group)
    if found is None:
        own = getattr(group, "background", None)
        found = _backgrounds.put(group, Background() if own is None else own())
        weakref.finalize(group, found.stop).atexit = False
    return found


def forget() -> None:
    """Forget all groups: their world has ended."""
    for running in _backgrounds.values():
        running.stop()
    _memories.clear()
    _backgrounds.clear()
    forget_groups()
