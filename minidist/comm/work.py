"""One call through the door: checked, started, waited for, counted; and its failure told in a sentence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist._names import unknown
from minidist.comm import checking, ledgers
from minidist.comm.errors import CollectiveError

Group = dist.ProcessGroup | None
"""A process group of torch.distributed; None is the whole world."""


class Way(NamedTuple):
    """How a collective is carried out, ready to begin."""

    start: Callable[[bool], Any]  # begins it, and returns at once where told to; the handle to wait on
    bytes_sent: int  # what the other ranks get from this one
    bytes_on_wire: int  # of these, through sockets


def by_torch(start: Callable[[], Any], bytes_sent: int) -> Way:
    """torch.distributed's own way, which always returns at once."""
    return Way(lambda at_once: start(), bytes_sent, bytes_sent)


MANY = 64
"""Calls under way from which on those that are complete are forgotten."""
_under_way: set[Work] = set()
"""Calls that nobody has waited for yet. They are kept, since gloo drops the message of a send whose handle is
dropped, and its receiver then waits in vain."""


class Work:
    """A collective under way. `wait` completes it and gives its result; results are not valid before.

    Wait for every one, sends too: a handle holds its tensors until then.
    """

    def __init__(
        self,
        call: ledgers.Call,
        start: Callable[[bool], Any],
        result: Callable[[], Any],
        at_once: bool = True,
    ) -> None:
        self._check = checking.enter(call)
        self._call, self._result = call, result
        self._value: Any = None
        self._waited = False
        self._started = time.perf_counter()
        ledgers.enter(call)
        try:
            self._handle = start(at_once)
        except RuntimeError as error:
            raise self._failed(error) from error
        returned = time.perf_counter()
        self._call.waited = returned - self._started
        for watcher in ledgers.watchers:
            watcher.called(call, self._started, returned, at_once, self._handle is None)
        if len(_under_way) >= MANY:
            # A copy: other threads call, too.
            _under_way.difference_update([work for work in list(_under_way) if work.done()])
        _under_way.add(self)

    def wait(self) -> Any:
        """Wait until the collective is complete; its result. A second call returns the same at once.

        Raises:
            CollectiveError: a peer is gone, or did not make the same call within the time limit.
        """
        if not self._waited:
            _under_way.discard(self)
            if self._check is not None:
                self._check()
            begun = time.perf_counter()
            handle, began, completed = self._handle, None, None
            try:
                if handle is not None:
                    handle.wait()
                    # The background thread knows; of torch's handles nobody asks before the wait.
                    began, completed = getattr(handle, "began", None), getattr(handle, "completed", None)
            except RuntimeError as error:
                raise self._failed(error) from error
            self._value = self._result()
            self._waited, self._handle = True, None
            ended = time.perf_counter()
            self._call.waited += ended - begun
            self._call.seconds = max(self._call.waited, (completed or ended) - self._started)
            for watcher in ledgers.watchers:
                watcher.waited(self._call, begun, ended, began, completed)
        return self._value

    def done(self) -> bool:
        """True where `wait` would not block. Of a send or a receive, gloo can say so only after it."""
        handle = self._handle
        return self._waited or handle is None or bool(handle.is_completed())

    def forget(self) -> None:
        """Give up on a call whose peer is dead: a send that was under way then may never complete."""
        _under_way.discard(self)
        cancel = getattr(self._handle, "cancel", None)
        if cancel is not None:
            cancel()

    def _failed(self, error: RuntimeError) -> CollectiveError:
        call = self._call
        return failed(f"{call.name} of {_described(call.dtype, call.shape)}", call.group, error)


def failed(what: str, ranks: Sequence[int], error: RuntimeError) -> CollectiveError:
    """The error for a call that the backend could not complete, with the reason in words."""
    text = str(error)
    if "imed out" in text:
        reason = (
            "the other ranks did not all make this call within the time limit; one may have skipped it, "
            "or still be computing: look there, or give a longer timeout="
        )
        if _several_hosts():
            reason += "; or their hosts may no longer reach each other: try ping from one to the other"
    elif any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe", "refused")):
        reason = "another rank's process has ended; its own error says why"
    elif "scalar type" in text:
        reason = "the backend cannot send this dtype; convert the tensor first, as in x.to(torch.int32)"
    else:
        reason = text
    return CollectiveError(
        f"{what} on rank {dist.get_rank()} with ranks {', '.join(map(str, ranks))}: {reason}"
    )


def _several_hosts() -> bool:
    """Whether a launcher said that it started fewer ranks here than there are."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return here.isdigit() and dist.is_initialized() and int(here) < dist.get_world_size()


def run(
    call: ledgers.Call,
    start: Callable[[bool], Any],
    result: Callable[[], Any],
    async_op: bool,
    alone: Callable[[], Any] | None = None,
) -> Any:
    """Start a call, and wait for its result unless told not to.

    Args:
        call: the ledger's entry.
        start: begins it, at once or not, and returns a handle with `wait` and `is_completed`.
        result: completes it after the wait and returns what the caller gets.
        async_op: return the `Work` and not its result.
        alone: done in place of `start` in a group of one, where there is nobody to talk to.
    """
    if len(call.group) == 1:
        if alone is not None:
            alone()
        start = _nothing
    work = Work(call, start, result, async_op)
    return work if async_op else work.wait()


def finish() -> None:
    """Wait for every call that nobody has waited for: done at the end of each function that a rank runs.

    Raises:
        CollectiveError: a peer is gone or late.
    """
    for work in list(_under_way):
        work.wait()


def _nothing(at_once: bool) -> None:
    """A group of one waits for nobody."""


def described(x: torch.Tensor) -> str:
    """A tensor in an error: float32[3x4]."""
    return _described(str(x.dtype).removeprefix("torch."), x.shape)


def _described(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{'x'.join(map(str, shape)) or 'scalar'}]"


def bytes_of(x: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def ranks_of(group: Group) -> tuple[int, ...]:
    """The members of a group, as ranks of the world; (0,) where there is no world.

    Raises:
        TypeError: it is no group.
        ValueError: this rank is not one of them.
    """
    return _membership(group)[0]


def rank_in(group: Group) -> int:
    """This rank's place in a group.

    Raises:
        ValueError: it has none.
    """
    return _membership(group)[1]


_memberships: dict[dist.ProcessGroup, tuple[tuple[int, ...], int]] = {}
"""Kept, since torch takes some microseconds to answer, and every call asks several times."""


def _membership(group: Group) -> tuple[tuple[int, ...], int]:
    """A group's members, and this rank's place among them."""
    if group is None:
        group = dist.group.WORLD
        if group is None:  # there is no world
            return (0,), 0
    if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"group is {group!r}; give a process group, such as a Mesh's group('dp'), or None for all ranks"
        )
    found = _memberships.get(group)
    if found is None:
        place = dist.get_rank(group)
        if place < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the group; only members may call its collectives"
            )
        found = _memberships[group] = tuple(dist.get_process_group_ranks(group)), place
    return found


def limit_of(group: Group) -> float:
    """Seconds that a call waits: the least of the group's and the world's; a new group's is 30 minutes."""
    world = dist.group.WORLD
    assert world is not None
    whole = {group or world, world}
    limits = [one._get_backend(device).options._timeout for one in whole for device in one._device_types]
    return float(min(limits).total_seconds())


def forget_groups() -> None:
    """Forget what is known of groups, since their world has ended."""
    _memberships.clear()


def check_tensor(name: str, x: object) -> torch.Tensor:
    """The tensor without its graph, or a TypeError."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} takes a torch tensor, not a {type(x).__name__}; torch.as_tensor makes one")
    if x.layout != torch.strided:
        raise TypeError(f"{name} takes a dense tensor, not {x.layout}; x.to_dense() makes one")
    return x.detach()


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """ValueError with the nearest known name where `name` is not one of them."""
    if name not in known:
        raise unknown(what, name, known)


def check_member(what: str, place: int, ranks: int) -> None:
    """TypeError where `place` is no number, ValueError where it is no rank of a group of `ranks`."""
    if isinstance(place, bool) or not isinstance(place, int):
        raise TypeError(f"{what} is {place!r}; give a rank, from 0 to {ranks - 1}")
    if not 0 <= place < ranks:
        raise ValueError(f"{what} is {place}; the group's ranks are 0 to {ranks - 1}")


def call_of(
    name: str,
    x: torch.Tensor,
    group: Group,
    algorithm: str,
    way: Way,
    message: ledgers.MessageIdentity | None = None,
) -> ledgers.Call:
    """The ledger's entry for a call."""
    dtype = str(x.dtype).removeprefix("torch.")
    sent = way.bytes_sent, way.bytes_on_wire
    return ledgers.Call(name, algorithm, dtype, tuple(x.shape), ranks_of(group), *sent, message=message)
