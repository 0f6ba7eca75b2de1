"""Find out why a rank does not come to a call, from what the ranks of a checked world let each other know.

A rank that waits for long, or has left, keeps a note in the world's store. The notes show that a rank has
left, or a circle of waiting ranks (the wait-for graph of Chandy, Misra and Haas 1983, "Distributed Deadlock
Detection"). A thread of each rank writes where its rank is.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist

from minidist.comm.checking.call_records import Record, user_stack
from minidist.comm.errors import CollectiveError

AWHILE = 0.05  # seconds of waiting before a rank looks why the others do not come, and between two such looks
WATCH_PAUSE = 0.1  # seconds after which a rank writes again where it is
SAME_CALLS = "all ranks of a group have to make the same calls"
OWN_THREAD = "minidist"  # how minidist's own threads are named; these make no calls of their own accord


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
        """Start anew, in the thread that is to be watched; all ranks have left the run before."""
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
        """Fail because the ranks that are waited for have not come; says where each of them is."""
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
