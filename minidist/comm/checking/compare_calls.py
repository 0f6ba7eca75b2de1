"""Before a collective begins, its ranks compare what they are about to call.

Each rank writes a record of its call into the world's store, under the group's name and the number of the
call, and reads what the others wrote under that number. Calls that contradict each other or are swapped end
in a `CollectiveError` on all ranks that names both sides and their lines; over gloo they would hang, abort
the process, or return wrong numbers without a word.

A synchronous call waits for the records of all ranks, even where the operation itself would not, as in a
broadcast; MPI 4.1, section 6.14, asks programs to bear either. An asynchronous call compares itself with the
records that are there, and with the rest in `Work.wait`.

A call costs some hundred microseconds, which the ledger leaves out. The check does not see tensors that one
line passes in another order, unless they are parameters or their gradients, nor calls outside minidist.comm.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from minidist.comm.checking.call_records import POINT_TO_POINT, CallOrder, Record, describe_swap, read_call
from minidist.comm.checking.deadlock_detection import AWHILE, OWN_THREAD, Watch, connect
from minidist.comm.errors import CollectiveError
from minidist.comm.ledgers import Call

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_PAUSE = 0.005
"""Seconds between two looks for the others' records; the first ones are closer together."""

_unordered: list[None] = []
"""One entry for each open `unordered`. Not a context variable: a backward pass runs in other threads."""


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """Tell `check=True` that calls inside may come in another order on other ranks.

    One rank's word is enough. Operations, shapes and dtypes are still compared.
    """
    _unordered.append(None)
    try:
        yield
    finally:
        _unordered.pop()


class CallSequence:
    """The calls of one group, or the messages from one rank to another: each member numbers its own."""

    def __init__(self, name: str, own: int, members: tuple[int, ...]) -> None:
        self.name, self.members = name, members
        self.calls: list[dict[int, Record]] = []  # by number: the records that are known, by member
        self.next = {member: 0 for member in members if member != own}  # each peer's first unknown call
        self.complete = 0  # calls that are known of all members, and agree
        self.taken = dict(self.next)  # how many of this rank's calls each peer says it has read
        self.deleted = 0  # how many of this rank's records are gone from the store
        self.order = CallOrder()

    def key(self, member: int, number: int) -> str:
        """Where a member's record lies in the store."""
        return f"{self.name}/{member}/{number}"

    def awaited(self, calls: int) -> dict[int, str]:
        """The peers whose first `calls` calls are not all known, and the key of each one's next."""
        return {peer: self.key(peer, number) for peer, number in self.next.items() if number < calls}


class Checker:
    """One rank's part in checking a world."""

    def __init__(self, store: Store, rank: int, ranks: int, limit: float) -> None:
        self.rank, self.limit = rank, limit
        self._store = connect(store)
        self._watch = Watch(self._store, connect(store), rank, ranks)
        self._lock = threading.RLock()  # autograd's threads make calls too
        self._run, self._ended = -1, False
        self._sequences: dict[str, CallSequence] = {}
        self.begin(None)

    def close(self) -> None:
        """Say that this rank makes no more calls."""
        self._watch.close()
        self.end("left the world")

    def begin(self, limit: float | None) -> None:
        """Count calls anew: all ranks have left the last run, so that nobody reads what it wrote."""
        with self._failing("before its function"):
            for sequence in self._sequences.values():
                self._delete(sequence, len(sequence.calls))
            self._run, self._ended, self._sequences = self._run + 1, False, {}
            # Before the launcher's own limit, which names no call.
            self._deadline = None if limit is None else time.monotonic() + limit - min(1.0, limit / 5)
            self._watch.begin(self._run)

    def end(self, how: str) -> None:
        """Say that this rank makes no more calls in this run."""
        if not self._ended and not self._watch.lost:
            self._ended = True
            with contextlib.suppress(dist.DistError):  # the store is gone where another process held it
                self._watch.say(how)

    def enter(self, call: Call) -> Callable[[], None] | None:
        """Compare a call; see the function of this name."""
        read = read_call(self.rank, call, not _unordered) if len(call.group) > 1 else None
        if read is None:
            return None
        record, given = read
        words = str(record)
        with self._failing(words), self._lock:
            if self._ended:
                self.begin(None)  # of a program that goes on after `launch` under torchrun
            self._watch.raise_failure()
            sequence = self._sequence(record, given)
            self._post(sequence, record, words)
            calls = len(sequence.calls)
            self._read(sequence)
        if given.get("async_op"):
            return lambda: self._wait(sequence, calls, words)
        if call.name != "send" or not given["x"].is_cuda:  # NCCL's send does not wait for the host
            self._wait(sequence, calls, words)
        return None

    def _sequence(self, record: Record, given: dict[str, Any]) -> CallSequence:
        """Where a call belongs."""
        group = given.get("group") or dist.group.WORLD
        assert group is not None
        name, members = f"{self._run}/{group.group_name}", record.group
        if record.name in POINT_TO_POINT:
            peer = record.group[record.root]
            members = (self.rank, peer) if record.name == "send" else (peer, self.rank)
            name = f"{name}/{members[0]}>{members[1]}/{given['tag']}"
        return self._sequences.setdefault(name, CallSequence(name, self.rank, members))

    def _post(self, sequence: CallSequence, record: Record, words: str) -> None:
        """Write this rank's next record, and delete those that everybody has read."""
        key = sequence.key(self.rank, len(sequence.calls))
        sequence.calls.append({self.rank: record})
        value = pickle.dumps((min(sequence.next.values()), record))
        self._watch.say("runs", last=words, also={key: value})
        self._delete(sequence, min(sequence.taken.values()))

    def _delete(self, sequence: CallSequence, number: int) -> None:
        for old in range(sequence.deleted, number):
            self._store.delete_key(sequence.key(self.rank, old))
        sequence.deleted = max(sequence.deleted, number)

    def _read(self, sequence: CallSequence) -> None:
        """Take in the records that are there, and compare them."""
        while awaited := sequence.awaited(len(sequence.calls)):
            if not self._store.check(list(awaited.values())):
                awaited = {peer: key for peer, key in awaited.items() if self._store.check([key])}
                if not awaited:
                    break
            for peer, value in zip(awaited, self._store.multi_get(list(awaited.values())), strict=True):
                known = sequence.calls[sequence.next[peer]]
                sequence.taken[peer], known[peer] = pickle.loads(value)
                sequence.next[peer] += 1
                self._compare(known)
        while sequence.complete < min(sequence.next.values()):
            known, sequence.calls[sequence.complete] = sequence.calls[sequence.complete], {}
            sequence.complete += 1
            swapped = sequence.order.add([known[member] for member in sequence.members])
            if swapped:
                self._watch.fail(describe_swap(*swapped))

    def _compare(self, known: dict[int, Record]) -> None:
        for one, other in itertools.combinations((known[rank] for rank in sorted(known)), 2):
            if one.contradicts(other):
                rule = "all ranks of a group have to make the same calls in the same order"
                if one.name in POINT_TO_POINT:
                    rule = "what is received has to have the shape and dtype of what is sent"
                calls = f"rank {one.rank} {one}; rank {other.rank} {other}"
                self._watch.fail(f"the ranks make different calls: {calls}; {rule}")

    def _wait(self, sequence: CallSequence, calls: int, call: str) -> None:
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
                    own = threading.current_thread()
                    others = (thread for thread in threading.enumerate() if thread is not own)
                    # Another thread may be about to make the call for which another rank waits.
                    alone = all(thread.name.startswith(OWN_THREAD) for thread in others)
                    self._watch.say("waits", awaited if alone else {}, call)
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
        """Turn the loss of the store, which lived in a process that has ended, into a CollectiveError."""
        try:
            yield
        except dist.DistError as error:
            self._watch.lost = True
            raise CollectiveError(
                f"rank {self.rank}, {call}: another rank's process has ended; its own error says why"
            ) from error
