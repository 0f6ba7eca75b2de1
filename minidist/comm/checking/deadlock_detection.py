"""Why does a rank not come? What the ranks of a checked world let each other know, and what follows from it.

Each rank keeps a note in the world's store: its last call and, after waiting for a while, the ranks that it
waits for. From the notes a waiting rank sees that another's function has returned, or that ranks wait for
each other in a circle (Chandy, Misra and Haas 1983, "Distributed Deadlock Detection": the wait-for graph).
The first failure that a rank writes down becomes that of all. When a call's time is up, a thread of each rank
answers at which line its rank is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from minidist.comm.checking.call_records import place_of_thread
from minidist.comm.errors import CollectiveError

AWHILE = 0.05
"""Seconds of waiting after which a rank looks why the others do not come, and between two such looks."""
WATCH_PAUSE = 0.1
"""Seconds between two looks whether another rank asks where this one is."""
OWN_THREAD = "minidist"
"""What the names of minidist's own threads begin with; these make no calls of their own accord."""

Note = dict[str, Any]
"""A rank's note: "state" ("runs", "waits" or how it left), "change" (its number), "last" (the last call, in
words), "awaits" (the ranks that it waits for, each with the key under which it looks for their record)."""


class Watch:
    """This rank's note, and its view of the others'. `store` and `asked`, for the thread, are connections."""

    def __init__(self, store: Any, asked: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.failure = ""
        self.lost = False  # the store is gone: each further use of it would only write a warning
        self.run = -1
        self._change, self._last, self._watched = 0, "", 0
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(
            target=self._answer, args=(asked,), daemon=True, name=f"{OWN_THREAD}-watch"
        )
        self._thread.start()

    def begin(self, run: int) -> None:
        """Start anew, in the thread that is to be watched; all ranks have left the run before."""
        if self.run >= 0:
            for name in (f"state/{self.rank}", f"at/{self.rank}", *(("abort", "where") * (self.rank == 0))):
                self.store.delete_key(self._key(name))
        self.run, self.failure, self._last = run, "", ""
        self._watched = threading.get_ident()
        self.say("runs")

    def close(self) -> None:
        """Answer no longer."""
        self._closing.set()
        self._thread.join()

    def say(
        self,
        state: str,
        awaits: dict[int, str] | None = None,
        last: str = "",
        also: dict[str, bytes] | None = None,
    ) -> None:
        """Renew this rank's note, and write the keys `also` in the same message."""
        with self._lock:
            self._change += 1
            self._last = last or self._last
            note = {"state": state, "change": self._change, "last": self._last, "awaits": awaits or {}}
            written = {**(also or {}), self._key(f"state/{self.rank}"): json.dumps(note).encode()}
            self.store.multi_set(list(written), list(written.values()))

    def fail(self, text: str) -> None:
        """CollectiveError on all ranks, with the text of the first that fails."""
        self.failure = self.store.compare_set(self._key("abort"), "", text).decode()
        self.raise_failure()

    def raise_failure(self) -> None:
        """CollectiveError where this run has failed, as far as this rank knows."""
        if self.failure:
            raise CollectiveError(self.failure)

    def look_around(self, call: str, awaited: Callable[[], Iterable[int]]) -> None:
        """CollectiveError where another rank has failed, or where one that `call` waits for will not come.

        `awaited` looks once more, and returns the ranks that have not come.
        """
        if self.store.check([self._key("abort")]):
            self.failure = self.store.get(self._key("abort")).decode()
            self.raise_failure()
        notes = self._notes()
        gone = {rank: note for rank, note in notes.items() if note["state"] not in ("runs", "waits")}
        if any(note["state"].startswith("raised") for note in gone.values()):
            time.sleep(2 * AWHILE)  # the launcher is to hear of the cause before it hears of what follows
        for rank in gone.keys() & set(awaited()) if gone else ():
            self.fail(
                f"rank {rank} {gone[rank]['state']}, {_last(gone[rank])}, and rank {self.rank} waits for it "
                f"in {call}; all ranks of a group have to make the same calls"
            )
        circle = list(itertools.pairwise(_circle(self.rank, notes)))
        # Notes grow old. But a rank that waits before and after this look, for a record that is not there,
        # has waited all the while.
        keys = [notes[one]["awaits"][str(other)] for one, other in circle]
        if not circle or any(self.store.check([key]) for key in keys) or self._notes() != notes:
            return
        waiting = (f"rank {one} waits for rank {other} in {notes[one]['last']}" for one, other in circle)
        self.fail(
            f"no rank can go on: {'; '.join(waiting)}; all ranks of a group have to make the same calls "
            "in the same order"
        )

    def time_out(self, call: str, missing: list[int], seconds: float) -> None:
        """Fail because the ranks that are waited for have not come; says where each of them is."""
        self.store.set(self._key("where"), "?")
        answers = {rank: self._key(f"at/{rank}") for rank in missing}
        patience = time.monotonic() + 2 * WATCH_PAUSE
        while time.monotonic() < patience and not self.store.check(list(answers.values())):
            time.sleep(0.01)
        notes, seen = self._notes(), []
        for rank, key in answers.items():
            where = f"is at {self.store.get(key).decode()}" if self.store.check([key]) else "does not answer"
            seen.append(f"rank {rank} {where}, {_last(notes[rank])}")
        self.fail(
            f"rank {self.rank} has waited {seconds:.1f} s in {call}, and rank {', '.join(map(str, missing))} "
            f"did not come: {'; '.join(seen)}; look there, or give a longer timeout="
        )

    def _answer(self, store: Any) -> None:
        answered = -1
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it any rank that could ask
            while not self._closing.wait(WATCH_PAUSE) and not self.lost:
                run = self.run
                if run != answered and store.check([f"{run}/where"]):
                    store.set(f"{run}/at/{self.rank}", place_of_thread(self._watched))
                    answered = run

    def _notes(self) -> dict[int, Note]:
        keys = {rank: self._key(f"state/{rank}") for rank in range(self.ranks)}
        there = [rank for rank, key in keys.items() if self.store.check([key])]
        values = self.store.multi_get([keys[rank] for rank in there])
        known = {rank: json.loads(value) for rank, value in zip(there, values, strict=True)}
        nothing: Note = {"state": "runs", "change": 0, "last": "", "awaits": {}}
        return {rank: known.get(rank, nothing) for rank in keys}

    def _key(self, name: str) -> str:
        return f"{self.run}/{name}"


def connect(store: Any) -> Any:
    """A connection of its own to a world's store: torch's is locked while it waits for other ranks."""
    return dist.PrefixStore("check", store.clone())  # type: ignore[attr-defined]


def _circle(own: int, notes: dict[int, Note]) -> list[int]:
    """Ranks of which each waits for the next, from `own` back to it; empty where there is no such circle."""
    paths, seen = [[own]], set()
    for path in paths:
        for rank in map(int, notes[path[-1]]["awaits"]):
            if rank == own:
                return [*path, own]
            if rank not in seen:
                seen.add(rank)
                paths.append([*path, rank])
    return []


def _last(note: Note) -> str:
    return f"its last call was {note['last']}" if note["last"] else "it has made no call"
