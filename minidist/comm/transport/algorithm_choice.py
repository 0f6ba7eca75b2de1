"""How a collective runs: by torch.distributed, in shared memory, or as an algorithm of messages.

`choose` names the algorithm of a call. If that is not torch's, a function for each operation plans the call:
what runs, and how many bytes it sends. `Background` runs such calls in their order.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist._names import unknown
from minidist.comm import checking
from minidist.comm.algorithms.execute import execute
from minidist.comm.algorithms.registry import ALGORITHMS as MESSAGE_ALGORITHMS
from minidist.comm.algorithms.ring import all_gather_among, reduce_scatter_among
from minidist.comm.algorithms.steps import Step, bytes_sent, offsets
from minidist.comm.errors import described, failed
from minidist.comm.tensor_checks import refusal
from minidist.comm.transport import shared_memory
from minidist.comm.transport.shared_memory import Failed, InStep, SharedMemory
from minidist.comm.work import (
    CallPlan,
    Group,
    GroupTable,
    bytes_of,
    call_of,
    forget_groups,
    limit_of,
    process_group,
    rank_in,
    ranks_of,
)

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
    known = sorted({name for names in ALGORITHMS.values() for name in names})
    if algorithm not in known:
        raise unknown("algorithm", algorithm, known)
    _preferred.append(algorithm)
    try:
        yield
    finally:
        _preferred.remove(algorithm)


def choose(operation: str, algorithm: str, group: Group, x: Tensor, op: str = "") -> str:
    """Return the algorithm of a call, the same on all ranks.

    A group's first call that may use shared memory waits for all its ranks and makes that memory, even if the
    call is asynchronous: a rank that did not wait could not know what the others chose. x is the call's
    tensor, or any other on its device. "torch" becomes "ring" if torch cannot reduce this dtype by `op`.
    Raises ValueError if the algorithm is unknown, or it is "shared_memory" and the group has none.
    """
    known = ALGORITHMS[operation]
    if algorithm not in known and algorithm != "auto":
        raise unknown(f"algorithm of {operation}", algorithm, ("auto", *known))
    if len(ranks_of(group)) == 1:
        return "torch"
    how = _available(operation, algorithm, group, x)
    return "ring" if how == "torch" and op and refusal(operation, op, x.dtype, how) else how


def _available(operation: str, algorithm: str, group: Group, x: Tensor) -> str:
    """Return the algorithm to use: shared memory where it is there, unless another was asked for."""
    asked = algorithm != "auto"
    if not asked:
        algorithm = preferred(operation)
    if algorithm != "shared_memory":
        return algorithm
    reason = f"its tensor is on {x.device}"
    if x.device.type == "cpu":
        found = memories.get(process_group(group))
        if found is None:  # making it is a collective, which the ranks' other calls must not mix with
            if checking.checker is not None:
                compared = checking.checker.enter(call_of(operation, algorithm, x, group))
                if compared is not None:
                    compared()
            found = group_memory(group, f"{operation} of {described(x)}")
        reason = found.why_not
    if not reason:
        return algorithm
    if not asked:
        return "torch"
    raise ValueError(f"{operation} cannot go through shared memory: {reason}; give algorithm='auto'")


def preferred(operation: str) -> str:
    """Return the algorithm that "auto" tries first."""
    known = ALGORITHMS[operation]
    return next((name for name in reversed(_preferred) if name in known), "shared_memory")


# What a group keeps between calls


class GroupMemory(NamedTuple):
    """The shared memory of a group."""

    memory: SharedMemory | None  # of the group's ranks on this host; None if they cannot share any
    why_not: str  # why the whole group cannot use it; empty if it can


memories: GroupTable[GroupMemory] = GroupTable()
_backgrounds: GroupTable[Background] = GroupTable()


def group_memory(group: Group, what: str = "a collective") -> GroupMemory:
    """Return a group's shared memory. The group's first call, `what` in errors, makes it: a collective."""
    group = process_group(group)
    found = memories.get(group)
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
        found = memories.put(group, GroupMemory(memory, why_not))
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


def forget() -> None:
    """Forget all groups: their world has ended."""
    for running in _backgrounds.values():
        running.stop()
    memories.clear()
    _backgrounds.clear()
    forget_groups()


# The plan of a call. Tensors are flat and contiguous. The sum of a mean is divided here.


def all_reduce(algorithm: str, x: Tensor, op: str, group: Group) -> CallPlan:
    """Reduce x in place."""
    ranks = len(ranks_of(group))
    memory = group_memory(group).memory if algorithm in ("shared_memory", "hierarchical") else None
    if memory is not None and (algorithm == "shared_memory" or len(memory.hosts) == 1):
        run = partial(shared_memory.all_reduce, memory, x, op)
        return _shared(group, run, 2 * (ranks - 1) * bytes_of(x) // ranks, algorithm)
    if memory is not None:
        return _hierarchical_all_reduce(memory, x, op, group)
    finish = partial(x.div_, ranks) if op == "mean" else None
    return _messages("all_reduce", algorithm, x, x, group, op, finish)


def reduce_scatter(algorithm: str, x: Tensor, out: Tensor, op: str, group: Group) -> CallPlan:
    """Reduce x, and put this rank's shard into out."""
    ranks, rank = len(ranks_of(group)), rank_in(group)
    if algorithm == "shared_memory":
        memory, parts = _memory(group), [i * len(out) for i in range(ranks + 1)]
        run = partial(shared_memory.reduce_scatter, memory, x, out, op, parts)
        return _shared(group, run, bytes_of(x) - bytes_of(out))
    scratch = x.clone()
    shard = scratch[rank * len(out) : (rank + 1) * len(out)]

    def finish() -> None:
        out.copy_(shard)
        if op == "mean":
            out.div_(ranks)

    return _messages("reduce_scatter", algorithm, scratch, scratch, group, op, finish)


def all_gather(algorithm: str, x: Tensor, out: Tensor, group: Group) -> CallPlan:
    """Put the x of all ranks into out. x may be a part of out."""
    ranks, rank = len(ranks_of(group)), rank_in(group)
    if algorithm == "shared_memory":
        memory, parts = _memory(group), [i * len(x) for i in range(ranks + 1)]
        run = partial(shared_memory.all_gather, memory, x, out, parts)
        return _shared(group, run, (ranks - 1) * bytes_of(x))
    own = out[rank * len(x) : (rank + 1) * len(x)]
    if own.data_ptr() != x.data_ptr():
        own.copy_(x)
    return _messages("all_gather", algorithm, out, out, group)


def broadcast(algorithm: str, x: Tensor, source: int, group: Group) -> CallPlan:
    """Copy x from one rank to all."""
    if algorithm == "shared_memory":
        run = partial(shared_memory.broadcast, _memory(group), x, source)
        sent = (len(ranks_of(group)) - 1) * bytes_of(x) if rank_in(group) == source else 0
        return _shared(group, run, sent)
    return _messages("broadcast", algorithm, x, x, group, options={"source": source})


def all_to_all(
    algorithm: str, x: Tensor, out: Tensor, sends: Sequence[int], receives: Sequence[int], group: Group
) -> CallPlan:
    """Send each rank its part of x, and put the parts that arrive into out. The parts have these lengths."""
    if algorithm == "shared_memory":
        run = partial(shared_memory.all_to_all, _memory(group), x, out, sends, receives)
        return _shared(group, run, bytes_of(x) - sends[rank_in(group)] * x.element_size())
    bounds = {"input_offsets": [0, *accumulate(sends)], "output_offsets": [0, *accumulate(receives)]}
    return _messages("all_to_all", algorithm, x, out, group, options=bounds)


def barrier(group: Group) -> CallPlan:
    """Wait for the other ranks, in shared memory."""
    return _shared(group, partial(shared_memory.barrier, _memory(group)), 0)


def _memory(group: Group) -> SharedMemory:
    memory = group_memory(group).memory
    assert memory is not None  # `choose` has checked it
    return memory


def _shared(group: Group, run: Callable[[], None], sent: int, algorithm: str = "shared_memory") -> CallPlan:
    return CallPlan(algorithm, partial(_begin, background(group), run), sent, 0)


def _begin(runner: Background, run: Callable[[], None], at_once: bool) -> Any:
    return runner.start(run) if at_once else runner.here(run)


def _messages(
    operation: str,
    algorithm: str,
    source: Tensor,
    target: Tensor,
    group: Group,
    op: str = "sum",
    finish: Callable[[], object] | None = None,
    options: dict[str, Any] | None = None,
) -> CallPlan:
    """Run an algorithm's steps, which send from `source` and receive into `target`; then call `finish`."""
    rank, generator = rank_in(group), MESSAGE_ALGORITHMS[operation][algorithm]
    steps = list(generator(rank, len(ranks_of(group)), len(source), **(options or {})))
    sent = bytes_sent(steps, source.element_size(), rank)
    runner = background(group)

    def run() -> None:
        with runner.call():  # a message of a failed call could still arrive and be taken for the next one's
            execute(steps, source, target, "sum" if op == "mean" else op, group)
        if finish is not None:
            finish()

    return CallPlan(algorithm, partial(_begin, runner, run), sent, sent)


def _hierarchical_all_reduce(memory: SharedMemory, x: Tensor, op: str, group: Group) -> CallPlan:
    """Reduce in shared memory inside each host, and by a ring of messages between hosts.

    The phases are those of `algorithms/hierarchical.py`. There are as many parts as the smallest host has
    ranks, so that every ring passes through every host. With m hosts the network carries 2 (m - 1) / m S for
    each host, however many ranks it has.

    Source: Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision", 3.3.
    """
    own, members, rings = memory.own, len(memory.members), min(map(len, memory.hosts))
    bounds = [*offsets(len(x), rings), *[len(x)] * (members - rings)]  # further ranks have an empty part
    part = x[bounds[own] : bounds[own + 1]]
    steps: list[Step] = []
    if own < rings:
        ring, here = [host[own] for host in memory.hosts], memory.hosts.index(memory.members)
        within = offsets(len(part), len(ring))
        steps = [*reduce_scatter_among(ring, here, within), *all_gather_among(ring, here, within)]
    combine = "sum" if op == "mean" else op

    def run() -> None:
        if members > 1:
            shared_memory.reduce_scatter(memory, x, part, combine, bounds)
        with memory.call():
            execute(steps, part, part, combine, group)
        if op == "mean":
            part.div_(sum(map(len, memory.hosts)))
        if members > 1:
            shared_memory.all_gather(memory, part, x, bounds)

    inside = (len(x) - len(part)) + (members - 1) * len(part)
    on_wire = bytes_sent(steps, x.element_size())
    sent = inside * x.element_size() + on_wire
    return CallPlan("hierarchical", partial(_begin, background(group), run), sent, on_wire)


# The thread that runs calls


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


class Background(InStep):
    """Runs a group's collectives in order: asynchronous ones in its thread, others in the caller's.

    A group has one for all algorithms, since the hierarchical all-reduce sends messages as well: two
    collectives at once would mix them up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task | None = None

    def start(self, run: Callable[[], object]) -> Task:
        """Run a collective in the thread, after all earlier ones."""
        task = Task(run, threading.Event())
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
        task = Task(run)
        task.run()
        return task

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
    group = process_group(group)
    found = _backgrounds.get(group)
    if found is None:
        own = getattr(group, "background", None)
        found = _backgrounds.put(group, Background() if own is None else own())
        weakref.finalize(group, found.stop).atexit = False
    return found
