"""`check=True`: before a collective begins, its ranks compare what they are about to call.

Each rank writes a record of its call into the world's store, under the group's name and the call's number,
and reads what the others wrote under that number. Calls that contradict each other end in a `CollectiveError`
on all ranks that names both and the lines that made them; over gloo they hang, abort the process, or return
wrong numbers without a word. An asynchronous call does not wait for the others' records: it compares itself
with those that are there, so that the later of two always sees the other, and with the rest in `Work.wait`.
Nobody waits for ever: `deadlock_detection.py` says who will not come, and the time limit says it of the
others.

A synchronous collective waits for all its ranks to call it, also where the operation itself would not, as in
a broadcast: MPI 4.1, section 6.14, asks of programs that they bear either. A call costs some hundred
microseconds, which the ledger leaves out. Not seen are tensors that one and the same line passes in another
order, unless they are parameters of a model or their gradients; and what does not go through the door.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from minidist.comm.checking import callsite
from minidist.comm.checking.deadlock_detection import AWHILE, OWN_THREAD, Watch, connect
from minidist.comm.checking.records import POINT_TO_POINT, CallOrder, Record
from minidist.comm.errors import CollectiveError
from minidist.comm.ledgers import Call

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_PAUSE = 0.005
"""Seconds between two looks for the others' records; the first ones are closer together."""

_checker: Checker | None = None
"""The check of the default world, where it has one."""


def start(store: Store, rank: int, ranks: int, limit: timedelta) -> None:
    """Check the calls of the world that is being joined; `limit` is the longest wait for a call's peers."""
    global _checker
    stop()
    _checker = Checker(store, rank, ranks, limit.total_seconds())
    atexit.register(stop)


def stop() -> None:
    """Check no longer; tells the others that this rank makes no more calls."""
    global _checker
    if _checker is not None:
        checker, _checker = _checker, None
        atexit.unregister(stop)
        checker.close()


def enter(call: Call) -> Callable[[], None] | None:
    """Compare a call that is about to begin with the other ranks', where the world is checked.

    Returns:
        What to call before the wait for the operation itself; None where nothing is left to compare.

    Raises:
        CollectiveError: the ranks' calls contradict each other, or a rank does not come.
    """
    return None if _checker is None else _checker.enter(call)


@contextlib.contextmanager
def run(limit: float | None) -> Iterator[None]:
    """A function's run on all ranks: its calls are counted anew, and a rank that leaves it makes no more.

    Args:
        limit: seconds that the run may take; None for no limit.
    """
    checker = _checker
    if checker is None:
        yield
        return
    checker.begin(limit)
    how = "returned from its function"
    try:
        yield
    except BaseException as error:
        how = f"raised {type(error).__name__}"
        raise
    finally:
        if checker is _checker:
            checker.end(how)


class Sequence:
    """The calls of one group, or the messages from one rank to another: each member numbers its own."""

    def __init__(self, name: str, own: int, members: tuple[int, ...], ordered: bool) -> None:
        self.name, self.own, self.members = name, own, members
        self.calls: list[dict[int, Record]] = []  # by number: the members' records that are known
        self.next = {member: 0 for member in members if member != own}  # each peer's first that is not
        self.complete = 0  # so many calls are known of all members, and agree
        self.taken = dict(self.next)  # so many of this rank's calls a peer has read, as far as it said
        self.deleted = 0
        self.order = CallOrder() if ordered else None

    def key(self, member: int, number: int) -> str:
        """Where a member's record lies in the store."""
        return f"{self.name}/{member}/{number}"

    def awaited(self, calls: int) -> dict[int, str]:
        """The peers of whose first `calls` calls some are not known, and the key of each one's next."""
        return {peer: self.key(peer, number) for peer, number in self.next.items() if number < calls}


class Checker:
    """One rank's part in checking a world; see the file's first lines."""

    def __init__(self, store: Store, rank: int, ranks: int, limit: float) -> None:
        self.rank, self.limit = rank, limit
        self._store = connect(store)
        self._watch = Watch(self._store, connect(store), rank, ranks)
        self._lock = threading.RLock()  # autograd's threads make calls too
        self._run, self._ended = -1, False
        self._written: set[str] = set()
        self.begin(None)

    def close(self) -> None:
        """Say that this rank makes no more calls."""
        self._watch.close()
        self.end("left the world")

    def begin(self, limit: float | None) -> None:
        """Count calls anew: all ranks have left the last run, so that nobody reads what it wrote."""
        with self._failing("before its function"):
            for key in self._written:
                self._store.delete_key(key)
        self._run, self._ended = self._run + 1, False
        self._sequences: dict[str, Sequence] = {}
        self._written = set()
        # Before the launcher's own limit, which names no call.
        self._deadline = None if limit is None else time.monotonic() + limit - min(1.0, limit / 5)
        with self._failing("before its function"):
            self._watch.begin(self._run)

    def end(self, how: str) -> None:
        """Say that this rank makes no more calls in this run."""
        if not self._ended and not self._watch.lost:
            self._ended = True
            with contextlib.suppress(dist.DistError):  # the store is gone where another process held it
                self._watch.say(how)

    def enter(self, call: Call) -> Callable[[], None] | None:
        """See `enter` above."""
        if len(call.group) == 1:
            return None
        site = callsite.find(call.name)
        if site is None:  # a step of one of our own algorithms
            return None
        record = Record.of(self.rank, call, site)
        with self._failing(str(record)), self._lock:
            if self._ended:
                self.begin(None)  # of a program that goes on after `launch` under torchrun
            self._watch.raise_failure()
            sequence = self._sequence(record, site)
            self._post(sequence, record)
            calls = len(sequence.calls)
            self._read(sequence)
        if site.arguments.get("async_op"):
            return lambda: self._wait(sequence, calls, str(record))
        if call.name == "send" and site.arguments["x"].is_cuda:  # NCCL's send does not wait for the host
            return None
        self._wait(sequence, calls, str(record))
        return None

    def _sequence(self, record: Record, site: callsite.Callsite) -> Sequence:
        """Where a call belongs."""
        group = site.arguments.get("group") or dist.group.WORLD
        assert group is not None
        name, members = f"{self._run}/{group.group_name}", record.group
        if record.name in POINT_TO_POINT:
            peer = record.group[record.root]
            members = (self.rank, peer) if record.name == "send" else (peer, self.rank)
            name = f"{name}/{members[0]}>{members[1]}/{site.arguments.get('tag', 0)}"
        if name not in self._sequences:
            self._sequences[name] = Sequence(name, self.rank, members, record.name not in POINT_TO_POINT)
        return self._sequences[name]

    def _post(self, sequence: Sequence, record: Record) -> None:
        """Write this rank's next record, and delete those that everybody has read."""
        key = sequence.key(self.rank, len(sequence.calls))
        sequence.calls.append({self.rank: record})
        self._written.add(key)
        value = f"{min(sequence.next.values())} {record.to_json()}"
        self._watch.say("runs", last=str(record), also={key: value})
        while sequence.deleted < min(sequence.taken.values()):
            old = sequence.key(self.rank, sequence.deleted)
            self._store.delete_key(old)
            self._written.discard(old)
            sequence.deleted += 1

    def _read(self, sequence: Sequence) -> None:
        """Take in the records that are there, and compare them."""
        while awaited := sequence.awaited(len(sequence.calls)):
            if not self._store.check(list(awaited.values())):
                awaited = {peer: key for peer, key in awaited.items() if self._store.check([key])}
                if not awaited:
                    break
            for peer, value in zip(awaited, self._store.multi_get(list(awaited.values())), strict=True):
                taken, _, text = value.partition(b" ")
                known = sequence.calls[sequence.next[peer]]
                known[peer] = Record.from_json(text)
                sequence.next[peer] += 1
                sequence.taken[peer] = int(taken)
                self._compare([known[member] for member in sequence.members if member in known])
        while sequence.complete < min(sequence.next.values()):
            known, sequence.calls[sequence.complete] = sequence.calls[sequence.complete], {}
            sequence.complete += 1
            swapped = (
                sequence.order.add([known[member] for member in sequence.members]) if sequence.order else []
            )
            if swapped:
                one, then, other, late = swapped
                self._watch.fail(
                    f"the ranks make the same calls in another order: rank {one.rank} {one}, and then "
                    f"{then}; rank {other.rank} {other}, and then {late}; one order has to hold on all ranks"
                )

    def _compare(self, known: list[Record]) -> None:
        for place, one in enumerate(known):
            for other in known[:place]:
                if one.contradicts(other):
                    rule = "all ranks of a group have to make the same calls in the same order"
                    if one.name in POINT_TO_POINT:
                        rule = "what is received has to have the shape and dtype of what is sent"
                    self._watch.fail(
                        f"the ranks make different calls: rank {other.rank} {other}; "
                        f"rank {one.rank} {one}; {rule}"
                    )

    def _wait(self, sequence: Sequence, calls: int, call: str) -> None:
        """Wait until so many calls are known of all members, and agree."""
        begun = time.monotonic()
        limit = begun + self.limit if self._deadline is None else min(begun + self.limit, self._deadline)
        pause, look, announced = 0.0, begun + AWHILE, False

        def missing() -> dict[int, str]:
            with self._lock:
                self._watch.raise_failure()
                self._read(sequence)
                return sequence.awaited(calls)

        with self._failing(call):
            while awaited := missing():
                if time.monotonic() >= look:
                    self._watch.say("waits", awaited if _is_only_thread() else {}, call)
                    announced = True
                    self._watch.look_around(call, missing)
                    if time.monotonic() >= limit:
                        self._watch.time_out(call, list(awaited), time.monotonic() - begun)
                    look = time.monotonic() + AWHILE
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, 1.3 * pause + 2e-5)
            if announced:
                self._watch.say("runs")

    @contextlib.contextmanager
    def _failing(self, call: str) -> Iterator[None]:
        """Tell a lost store in a sentence: it lives in a process that has ended, then."""
        try:
            yield
        except dist.DistError as error:
            self._watch.lost = True
            raise CollectiveError(
                f"rank {self.rank}, {call}: another rank's process has ended; its own error says why"
            ) from error


def _is_only_thread() -> bool:
    """False where another thread may be about to make the call for which another rank waits."""
    own = threading.current_thread()
    return all(thread is own or thread.name.startswith(OWN_THREAD) for thread in threading.enumerate())
