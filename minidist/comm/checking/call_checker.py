"""Compare this rank's calls with the other ranks', wait for theirs, and see why a call can't complete."""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch.distributed as dist

from minidist.comm.checking.call_records import Record, find_swap, read_call, user_stack
from minidist.comm.errors import FOLLOWS, CollectiveError
from minidist.comm.ledgers import Call

LONGEST_PAUSE = 0.005  # seconds between two looks for the others' records; the first are closer together
WINDOW = 64  # rounds of a group within which a swap is looked for
AWHILE = 0.05  # seconds of waiting before a rank looks why the others do not come, and between two such looks
WATCH_PAUSE = 0.1  # seconds after which a rank writes again where it is
SAME_CALLS = "all ranks of a group have to make the same calls"
OWN_THREAD = "minidist"  # how minidist's own threads are named; these make no calls of their own accord

_unordered: list[None] = []  # no context variable: a backward pass runs in other threads


@contextmanager
def unordered() -> Iterator[None]:
    """Inside, `check=True` lets other ranks make these calls in another order. One rank has to say so."""
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
        """Check the calls of a function that all ranks run in `limit` seconds; say when it ends."""
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
        """Compare a call that is about to begin; return what its wait has to do first, if anything."""
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
        """Compare the first `calls` calls; return the ranks that have not made the first incomplete one."""
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
        """Wait until all members have made the first `calls` calls, and these agree."""
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
            raise CollectiveError(text, peer_ended=True) from error


class Note(NamedTuple):
    """A rank's message about itself to the others."""

    last: str = ""  # its last call, in words
    left: str = ""  # how it left: "returned from its function"
    awaits: tuple[int, ...] = ()  # the ranks that it waits for
    key: str = ""  # where their records are missing

    def __str__(self) -> str:
        return f"its last call was {self.last}" if self.last else "it has made no call"


class Watch:
    """This rank's note, and its view of the others'."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        # One connection for each thread: it is locked while it waits for an answer.
        connections: Any = (dist.PrefixStore("check", store.clone()) for _ in range(2))  # type: ignore[attr-defined]
        self.store, own = connections
        self.rank, self.ranks, self.run, self.last = rank, ranks, -1, ""
        self._watched, self.closing = threading.get_ident(), threading.Event()
        self.thread = threading.Thread(target=self._write_place, args=(own,), daemon=True, name=OWN_THREAD)
        self.thread.start()

    def begin(self) -> None:
        """Begin a run, in the thread that is to be watched; all ranks have left the run before."""
        for kind in ("note", "at"):
            self.store.delete_key(f"{self.run}/{kind}/{self.rank}")
        self.run, self.last, self._watched = self.run + 1, "", threading.get_ident()
        self.failure = ""  # of this run

    def say(self, left: str = "", awaits: tuple[int, ...] = (), key: str = "") -> None:
        """Renew this rank's note."""
        self.store.set(f"{self.run}/note/{self.rank}", pickle.dumps(Note(self.last, left, awaits, key)))

    def fail(self, text: str) -> None:
        """Raise CollectiveError on all ranks, with the text of the first that fails."""
        self.failure = self.store.compare_set(f"{self.run}/failure", "", text).decode()
        raise CollectiveError(self.failure)

    def look_around(self, call: str, key: str, missing: list[int]) -> None:
        """Raise CollectiveError where a rank has failed, or one of `missing` will not come to `call`."""
        if failure := self._look(f"{self.run}/failure"):
            self.fail(failure.decode())
        others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
        # Another thread of this rank may be about to make the call for which another rank waits.
        alone = all(thread.name.startswith(OWN_THREAD) for thread in others)
        self.last = call
        self.say(awaits=tuple(missing) if alone else (), key=key)
        notes = self._notes()
        if any(note.left.startswith("raised") for note in notes):
            time.sleep(2 * AWHILE)  # the launcher is to hear of the cause before it hears of what follows
        for rank in missing:
            # The rank may have made the call, and left, since we looked for its record.
            if notes[rank].left and rank not in self.records(key):
                self.fail(
                    f"rank {rank} {notes[rank].left}, {notes[rank]}, and rank {self.rank} waits for it "
                    f"in {call}; {SAME_CALLS}"
                )
        paths = [[self.rank]]  # of ranks that each wait for the next; they grow while they are searched
        for path in paths:
            awaits = notes[path[-1]].awaits
            paths += [[*path, rank] for rank in awaits if not any(rank in known for known in paths)]
            circle = list(pairwise([*path, self.rank]))
            # A rank that waits before and after this look, for an absent record, waited all the while.
            absent = self.rank in awaits and all(b not in self.records(notes[a].key) for a, b in circle)
            if absent and self._notes() == notes:
                waits = (f"rank {a} waits for rank {b} in {notes[a].last}" for a, b in circle)
                self.fail(f"no rank can go on: {'; '.join(waits)}; {SAME_CALLS} in the same order")

    def time_out(self, call: str, missing: list[int], seconds: float) -> None:
        """Fail because some ranks have not come in time; say where each of them is."""
        places = (self._look(f"{self.run}/at/{rank}").decode() for rank in missing)
        seen = [f"rank {rank} {at or 'does not answer'}" for rank, at in zip(missing, places, strict=True)]
        self.fail(
            f"rank {self.rank} has waited {seconds:.1f} s in {call}, and rank {', '.join(map(str, missing))} "
            f"did not come: {'; '.join(seen)}; look there, or give a longer timeout="
        )

    def _write_place(self, store: Any) -> None:
        with suppress(RuntimeError):  # the store is gone
            while not self.closing.wait(WATCH_PAUSE):
                with suppress(KeyError):  # the thread has ended; no name keeps its frame, and so its tensors
                    path, _, line = user_stack(sys._current_frames()[self._watched])[0]
                    store.set(f"{self.run}/at/{self.rank}", f"is at {path}:{line}, {Note(self.last)}")

    def _notes(self) -> list[Note]:
        values = (self._look(f"{self.run}/note/{rank}") for rank in range(self.ranks))
        return [pickle.loads(value) if value else Note() for value in values]

    def records(self, key: str) -> dict[int, Record]:
        """The records that ranks have appended to a key, by rank: pickled, in hexadecimal digits."""
        records = sorted(pickle.loads(bytes.fromhex(part)) for part in self._look(key).decode().split())
        return {record.rank: record for record in records}

    def _look(self, key: str) -> bytes:
        """Return the value under a key, or b"". The store's `get` would wait for the key."""
        value: bytes = self.store.compare_set(key, "-", "-")
        return b"" if value == b"-" else value


checker: Checker | None = None
"""This rank's part in checking the default world; None where calls are not checked."""


def start(store: Any, rank: int, ranks: int, limit: float) -> None:
    """Check the calls of the world that is being joined; wait `limit` seconds for a call's peers."""
    global checker
    checker = Checker(store, rank, ranks, limit)


def stop() -> None:
    """Stop checking, and tell the others that this rank makes no more calls."""
    global checker
    if checker is not None:
        checker.end("left the world")
        checker.watch.closing.set()
        checker.watch.thread.join(1.0)
        checker = None


def run(limit: float | None) -> AbstractContextManager[None]:
    """Check the calls of a function that all ranks run in `limit` seconds, if the world is checked."""
    return nullcontext() if checker is None else checker.run(limit)
