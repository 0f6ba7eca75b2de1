"""Which way a collective takes: torch.distributed's own, shared memory, or an algorithm from messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minidist._names import unknown
from minidist.comm import checking, ledgers, mesh
from minidist.comm.transport.background_thread import Background
from minidist.comm.transport.shared_memory import Failed, SharedMemory
from minidist.comm.work import Group, described, failed, forget_groups, limit_of, ranks_of

_MESSAGES = ("ring", "tree")
ALGORITHMS = {
    "all_reduce": ("torch", "shared_memory", *_MESSAGES, "halving_doubling", "hierarchical", "naive"),
    "reduce_scatter": ("torch", "shared_memory", *_MESSAGES),
    "all_gather": ("torch", "shared_memory", *_MESSAGES),
    "broadcast": ("torch", "shared_memory", *_MESSAGES),
    "all_to_all": ("torch", "shared_memory", "pairwise"),
    "barrier": ("torch", "shared_memory"),
    "send": ("torch", "shared_memory"),
}
"""Names that each operation's `algorithm` takes beside "auto"; `send` and `recv` follow `using` alone."""

_preferred: list[str] = []
"""What `using` names, the innermost last. Not a context variable: a backward pass runs in other threads."""


@dataclass(frozen=True)
class Route:
    """What a group's ranks have in common, kept between calls."""

    memory: SharedMemory | None  # that of the group's ranks on this host, where they can have it
    why_not: str  # all of the group cannot talk through it; empty where they can


_routes: dict[dist.ProcessGroup, Route] = {}
_backgrounds: dict[dist.ProcessGroup, Background] = {}


@contextmanager
def using(algorithm: str) -> Iterator[None]:
    """Let every collective inside that does not name an algorithm itself, strategies' too, take this one.

    Operations that have no such algorithm go on as before. All ranks of a group have to use the same.

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


def choose(operation: str, algorithm: str, group: Group, x: torch.Tensor, async_op: bool) -> str:
    """Return the algorithm that a call takes, on all ranks the same.

    A group's first call through shared memory waits for its ranks, to make the memory. An asynchronous one
    may not wait, so that "auto" is "torch" for those before the first that is synchronous.

    Args:
        operation: "all_reduce" and so on.
        algorithm: as the caller named it.
        group: whose ranks make the call.
        x: the tensor, or any other on its device.
        async_op: whether the call returns at once.

    Raises:
        ValueError: an unknown algorithm; or shared memory where there is none.
    """
    known = ALGORITHMS[operation]
    if algorithm not in known and algorithm != "auto":
        raise unknown(f"algorithm of {operation}", algorithm, ("auto", *known))
    if len(ranks_of(group)) == 1:
        return "torch"
    asked = algorithm != "auto"
    if not asked:
        algorithm = preferred(operation)
    if algorithm != "shared_memory":
        return algorithm
    reason = f"its tensor is on {x.device}"
    if x.device.type == "cpu":
        what = f"{operation} of {described(x)}"
        if not asked and async_op and not _known(group):
            return "torch"
        if not _known(group):  # making one is a collective, too, which other calls must not meet
            dtype = str(x.dtype).removeprefix("torch.")
            check = checking.enter(
                ledgers.Call(operation, algorithm, dtype, tuple(x.shape), ranks_of(group), 0, 0)
            )
            if check is not None:
                check()
        reason = route(group, what).why_not
    if not reason:
        return algorithm
    if not asked:
        return "torch"
    raise ValueError(f"{operation} cannot go through shared memory: {reason}; give algorithm='auto'")


def preferred(operation: str) -> str:
    """Return the algorithm that "auto" tries first."""
    known = ALGORITHMS[operation]
    return next((name for name in reversed(_preferred) if name in known), "shared_memory")


def route(group: Group, what: str = "a collective") -> Route:
    """Return what a group's collectives run on. The group's first call, `what`, makes it: a collective.

    Raises:
        CollectiveError: a peer is gone or late.
    """
    group = group or dist.group.WORLD
    assert group is not None
    found = _routes.get(group)
    if found is None:
        memory, why_not = None, ""
        try:
            # A group that only counts what is sent brings memory of its own, and an end of its background.
            own = getattr(group, "shared_memory", None)
            memory = SharedMemory(group, limit_of(group)) if own is None else own()
        except Failed as error:
            why_not = str(error)
        except RuntimeError as error:
            raise failed(what, ranks_of(group), error) from error
        if memory is not None and len(memory.hosts) > 1:
            why_not = f"the ranks are on {len(memory.hosts)} hosts"
        found = _routes[group] = Route(memory, why_not)
    return found


def empty_shared(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, group: Group = None
) -> torch.Tensor:
    """Make a tensor of zeros that collectives can read and write where it lies. A collective.

    It lies in memory that all CPU ranks of this host map: collectives of the group on it, or on contiguous
    slices of it, at the same place on all ranks, copy nothing into buffers and out of them. Where ranks can't
    share memory it is an ordinary tensor. Once a collective on it has returned, its values are this rank's
    own, which no other rank changes before the next one. The memory is freed with the last tensor in it.

    Args:
        shape: the same on all ranks.
        dtype: the same on all ranks.
        group: whose ranks share it; None for all.

    Raises:
        CollectiveError: a peer is gone or late.
    """
    size = tuple(shape)
    memory = route(group).memory if len(ranks_of(group)) > 1 else None
    try:
        shared = memory.empty(size, dtype) if memory is not None else None
    except RuntimeError as error:
        raise failed("empty_shared", ranks_of(group), error) from error
    return torch.zeros(size, dtype=dtype) if shared is None else shared


def background(group: Group) -> Background:
    """Return what runs a group's collectives that are not torch's, in the order of their calls.

    One for all: the hierarchical all-reduce sends messages too, and two at once would mix up theirs.
    """
    group = group or dist.group.WORLD
    assert group is not None
    found = _backgrounds.get(group)
    if found is None:
        own = getattr(group, "background", None)
        found = _backgrounds[group] = Background("minidist collectives") if own is None else own()
    return found


def _known(group: Group) -> bool:
    return (group or dist.group.WORLD) in _routes


def forget() -> None:
    """Forget all groups, since their world has ended."""
    for running in _backgrounds.values():
        running.stop()
    _routes.clear()
    _backgrounds.clear()
    mesh.forget()
    forget_groups()
