"""`check=True`: ranks compare their calls, and a mismatch or a deadlock is an error that names both sides.

call_records.py has what a rank tells of a call, contradictions and swaps; deadlock_detection.py says why a
rank does not come. A synchronous call waits for all ranks' records, even where the operation would not, as in
a broadcast (MPI 4.1, section 6.14, asks programs to bear either); an asynchronous one in `Work.wait`. A call
costs some hundred microseconds, outside the ledger. Calls outside minidist.comm are not seen.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch.distributed as dist

from minidist.comm.checking.call_records import Record, find_swap, read_call
from minidist.comm.checking.deadlock_detection import AWHILE, SAME_CALLS, Watch
from minidist.comm.errors import FOLLOWS, CollectiveError
from minidist.comm.ledgers import Call

LONGEST_PAUSE = 0.005  # seconds between two looks for the others' records; the first are closer together
WINDOW = 64  # rounds of a group within which a swap is looked for

_unordered: list[None] = []  # no context variable: a backward pass runs in other threads


@contextmanager
def unordered() -> Iterator[None]:
    """Tell `check=True` that calls inside may come in another order elsewhere; one rank's word is enough."""
    _unordered.append(None)
    try:
        yield
    finally:
        _unordered.pop()


@dataclass
class CallSequence:
    """The calls of one group, or the messages from one rank to another: each member numbers its own."""

    name: str
    members: tuple[int, ...]
    made: int = 0  # calls that this rank has made
    compared: int = 0  # calls that are known of all members, and agree
    deleted: int = 0  # calls whose records are gone from the store
    rounds: deque[dict[int, Record]] = field(default_factory=lambda: deque(maxlen=WINDOW))


class Checker:
    """One rank's part in checking a world."""

    def __init__(self, store: Any, rank: int, ranks: int, limit: float) -> None:
        self.rank, self.limit = rank, limit
        self.watch = Watch(store, rank, ranks)
        self._lock = threading.RLock()  # autograd's threads make calls too
        self._sequences: dict[str, CallSequence] = {}
        self._begin(math.inf)

    @contextmanager
    def run(self, limit: float | None) -> Iterator[None]:
        """Check a function that all ranks run; see the function of this name."""
        with self._failing("before its function"):  # time out before the launcher, which names no call
            self._begin(math.inf if limit is None else time.monotonic() + limit - min(1.0, limit / 5))
        try:
            yield
        except BaseException as error:
            self.end(f"raised {type(error).__name__}")
            raise
        self.end("returned from its function")

    def _begin(self, deadline: float) -> None:
        """Count calls anew: all ranks have left the last run, so that nobody reads what it wrote."""
        for sequence in self._sequences.values():
            self._delete(sequence, sequence.made)
        self._ended, self._sequences, self._deadline = False, {}, deadline
        self.watch.begin()

    def end(self, how: str) -> None:
        """Say that this rank makes no more calls in this run."""
        if not self._ended:
            self._ended = True
            with suppress(dist.DistError):  # the store is gone where another process held it
                self.watch.say(left=how)

    def enter(self, call: Call) -> Callable[[], None] | None:
        """Compare a call; see the function of this name."""
        if len(call.group) < 2 or (read := read_call(self.rank, call, not _unordered)) is None:
            return None
        record, given = read
        world: Any = dist.group.WORLD
        name = str(call.message or (given["group"] or world).group_name)
        members = call.message[:2] if call.message else call.group
        with self._failing(record.at()), self._lock:
            if self._ended:
                self._begin(math.inf)  # of a program that goes on after `launch` under torchrun
            if self.watch.failure:  # an asynchronous call of another rank may be under way
                raise CollectiveError(self.watch.failure)
            sequence = self._sequences.setdefault(name, CallSequence(f"{self.watch.run}/{name}/", members))
            key, sequence.made = f"{sequence.name}{sequence.made}", sequence.made + 1
            value = pickle.dumps(record._replace(compared=sequence.compared)).hex()
            self.watch.store.append(key, f"{value} ")
            self.watch.last, calls = record.at(), sequence.made
            if given["async_op"]:
                self._compare(key)
                return lambda: self._wait(sequence, calls, record.at())
        if call.name != "send" or not given["x"].is_cuda:  # NCCL's send does not wait for its receiver
            self._wait(sequence, calls, record.at())
        return None

    def _compare(self, key: str) -> dict[int, Record]:
        """Compare the records of a call that are there, and return them by rank."""
        records = self.watch.records(key)
        for one, other in combinations(records.values(), 2):
            if one.contradicts(other):
                rule = "what is received has to have the shape and dtype of what is sent"
                if one.kind[0] != "message":
                    rule = f"{SAME_CALLS} in the same order"
                calls = f"rank {one.rank} {one.at()}; rank {other.rank} {other.at()}"
                self.watch.fail(f"the ranks make different calls: {calls}; {rule}")
        return records

    def _missing(self, sequence: CallSequence, calls: int) -> list[int]:
        """Compare so many calls, and return the ranks that have not made the first incomplete one."""
        with self._lock:
            while sequence.compared < calls:
                records = self._compare(f"{sequence.name}{sequence.compared}")
                if missing := sorted({*sequence.members} - records.keys()):
                    return missing
                if swap := find_swap(sequence.rounds, records.values()):
                    self.watch.fail(swap)
                sequence.compared += 1
                sequence.rounds.append(records)
                self._delete(sequence, min(record.compared for record in records.values()))
            return []

    def _delete(self, sequence: CallSequence, number: int) -> None:
        """Delete the records of the calls before `number`, which all ranks have compared."""
        while self.rank == sequence.members[0] and sequence.deleted < number:
            self.watch.store.delete_key(f"{sequence.name}{sequence.deleted}")
            sequence.deleted += 1

    def _wait(self, sequence: CallSequence, calls: int, call: str) -> None:
        """Wait until so many calls are known of all members, and agree."""
        begun = time.monotonic()
        limit, look, pause = min(begun + self.limit, self._deadline), begun + AWHILE, 0.0
        with self._failing(call):
            while missing := self._missing(sequence, calls):
                if time.monotonic() >= look:
                    self.watch.look_around(call, f"{sequence.name}{sequence.compared}", missing)
                    if time.monotonic() >= limit:
                        self.watch.time_out(call, missing, time.monotonic() - begun)
                    look = time.monotonic() + AWHILE
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, 1.3 * pause + 2e-5)
            if look > begun + AWHILE:
                self.watch.say()  # that this rank no longer waits

    @contextmanager
    def _failing(self, call: str) -> Iterator[None]:
        """Turn the loss of the store, which lived in a process that has ended, into a CollectiveError."""
        try:
            yield
        except dist.DistError as error:
            self._ended = True  # each further use of the store would only write a warning
            self.watch.closing.set()
            text = f"rank {self.rank}, {call}: another rank's process has ended{FOLLOWS}"
            raise CollectiveError(text) from error


_checker: Checker | None = None  # of the default world


def start(store: Any, rank: int, ranks: int, limit: float) -> None:
    """Check the calls of the world that is being joined; wait `limit` seconds for a call's peers."""
    global _checker
    _checker = Checker(store, rank, ranks, limit)


def stop() -> None:
    """Stop checking, and tell the others that this rank makes no more calls."""
    global _checker
    if _checker is not None:
        _checker.end("left the world")
        _checker.watch.closing.set()
        _checker.watch.thread.join(1.0)
        _checker = None


def enter(call: Call) -> Callable[[], None] | None:
    """Compare a call that is about to begin; returns what its wait has to do first, if anything."""
    return None if _checker is None else _checker.enter(call)


def run(limit: float | None) -> AbstractContextManager[None]:
    """Count the calls of a function that all ranks run in `limit` seconds; tell the others when it ends."""
    return nullcontext() if _checker is None else _checker.run(limit)
