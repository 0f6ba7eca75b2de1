"""A call of the communication API: counted, started and waited for.

`run` takes every call through here: it makes the ledger's entry, lets the ranks of a checked world compare
the call, and starts it. `Work.wait` completes it, or says in a sentence why it failed. A `CallPlan` says how:
by torch.distributed, or by minidist itself, at once or in the group's thread (`Background`).

First come the groups that make calls, each with a record of what this process has made for it, and the
algorithms that they may ask for.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from minidist._names import unknown
from minidist.comm import ledgers, returned_ranks
from minidist.comm.algorithms.registry import ALGORITHMS as MESSAGE_ALGORITHMS
from minidist.comm.checking import call_checker
from minidist.comm.errors import CollectiveError, describe_tensor, failed, note_out_of_step
from minidist.comm.stream_times import StreamTimes

Result = TypeVar("Result")

# Groups

Group = dist.ProcessGroup | None
"""A process group of torch.distributed; None is the whole world."""


class Known:
    """What this process knows of a group. It holds no group: one that was destroyed must not stay alive."""

    def __init__(self, ranks: tuple[int, ...], own: int, name: str = "") -> None:
        self.ranks, self.own = ranks, own  # the members, as ranks of the world; this rank's number among them
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.number = int.from_bytes(digest, "little", signed=True)  # of the group, the same on all its ranks
        self.memory: Any = None  # `transport.shared_memory.GroupMemory`, from its first call on
        self.background: Any = None  # `Background`, which runs its collectives
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
        record = Known(tuple(dist.get_process_group_ranks(group)), own, group.group_name)
        found = _known.setdefault(id(group), record)  # of threads that come at once, the first makes it
        # The group's id may name another object only after this has run.
        weakref.finalize(group, _forget, id(group)).atexit = False
    return found


def _forget(key: int) -> None:
    found = _known.pop(key, None)
    if found is not None and found.background is not None:
        found.background.stop()


def forget_groups() -> None:
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


# Algorithms

_OF_MESSAGES = {**MESSAGE_ALGORITHMS, "barrier": {}, "send": {}}
ALGORITHMS = {operation: ("torch", "shared_memory", *names) for operation, names in _OF_MESSAGES.items()}
"""The names that each operation's `algorithm` takes, besides "auto". `send` and `recv` take none, and follow
`using` alone."""

_preferred: list[str] = []
"""The algorithms that `using` names, the innermost last. Not a context variable: backward passes run in other
threads."""


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
    algorithms = sorted({name for names in ALGORITHMS.values() for name in names})
    if algorithm not in algorithms:
        raise unknown("algorithm", algorithm, algorithms)
    _preferred.append(algorithm)
    try:
        yield
    finally:
        _preferred.remove(algorithm)


def preferred(operation: str) -> str:
    """Return the algorithm that "auto" tries first."""
    return next((name for name in reversed(_preferred) if name in ALGORITHMS[operation]), "shared_memory")


# Calls


class CallPlan(NamedTuple):
    """How a call will be carried out."""

    algorithm: str  # as the ledger names it: "torch", "shared_memory", "ring"
    start: Callable[[bool], Any]  # begins it, and with True returns at once; gives the handle to wait on
    bytes_sent: int  # what the other ranks get from this one
    bytes_on_wire: int  # the part of them that goes through sockets


def by_torch(start: Callable[[], Any], bytes_sent: int) -> CallPlan:
    """Plan a call of torch.distributed, which always returns at once."""
    return CallPlan("torch", lambda at_once: start(), bytes_sent, bytes_sent)


def by_minidist(
    group: Group, call: Callable[[], None], sent: int, wire: int = 0, algorithm: str = "shared_memory"
) -> CallPlan:
    """Plan a call that minidist runs itself: at once, or in the group's thread."""
    runner = background(group)
    return CallPlan(algorithm, lambda at_once: (runner.start if at_once else runner.here)(call), sent, wire)


MANY = 64
"""When this many calls are under way, the complete ones among them are forgotten."""
under_way: set[Work] = set()
"""Calls that nobody has waited for yet. They are kept because gloo drops the message of a send with its
handle, and the receiver then waits in vain."""


class Work:
    """A call under way. Its `wait` completes it and returns its result, which is not valid before.

    Wait for every one, also for sends: a handle holds its tensors until then.
    """

    def __init__(
        self, call: ledgers.Call, start: Callable[[bool], Any], result: Callable[[], Any], at_once: bool
    ) -> None:
        self._check = None if call_checker.checker is None else call_checker.checker.enter(call)
        self._call, self._result = call, result
        self._value: Any = None
        self._waited = False
        self._stream = StreamTimes() if call.on_gpu else None
        self._started = time.perf_counter()
        for ledger in ledgers.opened:
            ledger.calls.append(call)
        try:
            self._handle = start(at_once)
        except RuntimeError as error:
            raise self._failed(error) from error
        returned = time.perf_counter()
        self._call.waited = returned - self._started
        for watcher in ledgers.watchers:
            watcher.called(call, self._started, returned, at_once, self._handle is None)
        if len(under_way) >= MANY:
            # A copy, because other threads make calls too.
            under_way.difference_update([work for work in list(under_way) if work.done()])
        under_way.add(self)

    def wait(self) -> Any:
        """Wait until the call is complete, and return its result. A second `wait` returns the same at once.

        Raises:
            CollectiveError: a peer is gone, or did not make the same call within the time limit.
        """
        if not self._waited:
            under_way.discard(self)
            if self._check is not None:
                try:
                    self._check()
                except CollectiveError as error:
                    note_out_of_step(str(error))
                    raise
            begun = time.perf_counter()
            handle, began, completed = self._handle, None, None
            try:
                if self._stream is not None:
                    self._stream.asks()
                if isinstance(handle, dist.Work) and self._call.message is None:
                    returned_ranks.wait(handle, self._call.group)
                elif handle is not None:
                    handle.wait()
                    # Only handles of the background thread know their times.
                    began, completed = getattr(handle, "began", None), getattr(handle, "completed", None)
            except RuntimeError as error:
                raise self._failed(error) from error
            self._value = self._result()
            self._waited, self._handle = True, None
            ended = time.perf_counter()
            self._call.waited += ended - begun
            self._call.seconds = max(self._call.waited, (completed or ended) - self._started)
            self._call.stream_times = self._stream.ends() if self._stream else None
            for watcher in ledgers.watchers:
                watcher.waited(self._call, begun, ended, began, completed)
        return self._value

    def done(self) -> bool:
        """Return whether `wait` would return at once. Of a message, gloo knows it only after `wait`."""
        handle = self._handle
        return self._waited or handle is None or bool(handle.is_completed())

    def forget(self) -> None:
        """Give up on a call whose peer is dead, because a send to it may never complete."""
        under_way.discard(self)
        cancel = getattr(self._handle, "cancel", None)
        if cancel is not None:
            cancel()

    def _failed(self, error: RuntimeError) -> CollectiveError:
        call = self._call
        by_mailbox = call.message is not None and call.algorithm == "shared_memory"  # which forgets it
        return failed(_words(call), call.group, error, leaves_traces=not by_mailbox)


def call_of(
    name: str,
    algorithm: str,
    x: torch.Tensor,
    group: Group,
    bytes_sent: int = 0,
    bytes_on_wire: int = 0,
    message: ledgers.MessageIdentity | None = None,
) -> ledgers.Call:
    """Make the ledger's entry for a call."""
    dtype, shape, ranks = str(x.dtype).removeprefix("torch."), tuple(x.shape), ranks_of(group)
    sent = bytes_sent, bytes_on_wire
    return ledgers.Call(name, algorithm, dtype, shape, ranks, *sent, message=message, on_gpu=x.is_cuda)


def run(
    name: str,
    x: torch.Tensor,
    group: Group,
    plan: CallPlan,
    result: Callable[[], Result],
    async_op: bool,
    alone: Callable[[], object] | None = None,
    message: ledgers.MessageIdentity | None = None,
) -> Result:
    """Start a call, and wait for its result unless told not to.

    result: completes the call after the wait, and returns what the caller gets. alone: runs instead of the
    call in a group of one, which communicates with nobody.
    """
    algorithm, start, bytes_sent, bytes_on_wire = plan
    call = call_of(name, algorithm, x, group, bytes_sent, bytes_on_wire, message)
    if len(call.group) == 1:
        if alone is not None:
            alone()
        start = _nothing
    # The ranks of a group pair their calls by order. Two threads of a rank have no order that the other ranks
    # could share: rank 0's first thread would be paired with rank 1's second, and both would get wrong
    # numbers without a word. A lock would only hide it, so both threads get an error. Messages are paired by
    # their tags, so any number of threads may send them.
    if message is None and (other := _inside.setdefault(group, call)) is not call:
        _inside[group] = call  # so that the other finds it when it leaves
        raise _two_threads(call, other)
    try:
        work = Work(call, start, result, async_op)
        return cast("Result", work if async_op else work.wait())
    finally:
        if message is None and (other := _inside.pop(group, call)) is not call:
            raise _two_threads(call, other)  # the other has come meanwhile


_inside: dict[Group, ledgers.Call] = {}
"""The call of each group in which a thread is now. One operation on a dictionary is atomic. Calls that are
under way (`async_op=True`) do not count: minidist's own thread runs them in their order."""


def _two_threads(call: ledgers.Call, other: ledgers.Call) -> CollectiveError:
    text = (
        f"two threads of this rank are in collectives of one group at once, {_words(call)} and "
        f"{_words(other)}; ranks pair their calls by order, so make them in one thread, or give each thread "
        "a group of its own, such as Mesh.duplicate's"
    )
    note_out_of_step(text)
    return CollectiveError(text)


def _words(call: ledgers.Call) -> str:
    return f"{call.name} of {describe_tensor(call.dtype, call.shape)}"


def _nothing(at_once: bool) -> None:
    """Start nothing: a group of one waits for nobody."""


def finish() -> None:
    """Wait for every call that nobody has waited for: done at the end of each function that a rank runs."""
    for work in list(under_way):
        work.wait()


def copy_back(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous buffer into `x`, unless it lies in the memory of `x`; return `x`."""
    if buffer.data_ptr() != x.data_ptr():
        x.detach().copy_(buffer)
    return x


def bytes_of(x: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.numel() * x.element_size()


# The thread that runs calls


class Failed(RuntimeError):
    """A collective failed here; the communication API adds to it what and where."""


class Task:
    """A collective to run, with `wait` and `is_completed` like torch's handles."""

    def __init__(self, run: Callable[[], object], event: threading.Event | None = None) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._event = event  # set at the end; None if it runs before anybody can wait
        self.began: float | None = None  # `time.perf_counter()` at its begin
        self.completed: float | None = None  # and at its end

    def run(self) -> None:
        """Run it now. `wait` raises its error."""
        self.began = time.perf_counter()
        try:
            # Only in inference mode may all tensors be written to, those made in it included.
            with torch.inference_mode():
                self._run()
        except BaseException as error:
            self._error = error
        del self._run  # it holds tensors
        self.completed = time.perf_counter()
        if self._event is not None:
            self._event.set()

    def wait(self) -> None:
        """Wait until it is complete. The collective's own time limit bounds the wait."""
        if self._event is not None:
            self._event.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.completed is not None


class Background:
    """Runs a group's collectives in order: asynchronous ones in its thread, others in the caller's.

    A group has one for all algorithms, since the hierarchical all-reduce sends messages as well: two
    collectives at once would mix them up. After one that failed halfway no other runs: a message of it could
    still arrive, and be taken for the next one's.
    """

    def __init__(self) -> None:
        self._broken = ""  # how a collective has failed
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task | None = None

    def start(self, run: Callable[[], object]) -> Task:
        """Run a collective in the thread, after all earlier ones."""
        task = Task(partial(self._in_step, run), threading.Event())
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="minidist collectives", daemon=True)
            self._thread.start()
        self._last = task
        self._queue.put(task)
        return task

    def here(self, run: Callable[[], object]) -> Task:
        """Run a collective after all earlier ones; in the caller's thread if none is under way."""
        if self._last is not None and not self._last.is_completed():
            return self.start(run)
        task = Task(partial(self._in_step, run))
        task.run()
        return task

    def _in_step(self, run: Callable[[], object]) -> None:
        if self._broken:
            raise Failed(f"an earlier call on these ranks failed, and left them out of step: {self._broken}")
        try:
            run()
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise

    def stop(self) -> None:
        """End the thread when it has run what it was given."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # frees its tensors while the thread waits


def background(group: Group) -> Background:
    """Return what runs a group's collectives, except torch's own, in the order of their calls."""
    record = known(group)
    if record.background is None:
        own = getattr(process_group(group), "background", Background)  # a dry run's group has its own
        record.background = own()
    found: Background = record.background
    return found
