"""When a parameter server may make its next update, so that no gradient becomes older than allowed.

Staleness is the number of updates between a worker's pull and the update that contains its push. The server
reports here who pulled, pushed and left, and asks whose pushes make the next update. One rule covers all
cases: *an update waits for every worker that it would make too late, and takes every waiting push that the
next update would make too old.* Without a bound each push is an update by itself (Dean et al.'s Downpour).
With bound 0 an update waits for all workers and takes all their pushes: the synchronous parameter server. In
between lies Ho et al.'s stale synchronous parallel. With bound 1, say, worker 0 has pushed after update 5,
and worker 1 still computes with the parameters of update 4. Update 6 waits for worker 1: otherwise its push
would be in update 7 at the earliest, after two others, 5 and 6.

Sources: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
section 2, which bounds steps, where this bounds updates; Li et al. 2014, "Scaling Distributed Machine
Learning with the Parameter Server", section 3.4 (bounded delay).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Updates:
    """The updates that one server has made, and which pushes may go into the next.

    After a worker's push has gone into an update, the worker is expected to pull. Until it does, it counts as
    having pulled that very update, so workers that run ahead wait for it wherever it spends its time.

    Several servers each decide for themselves, and yet workers cannot wait for each other in a circle. If a
    push to a server waits for another worker, that worker's last push was in an update there before the pull
    that precedes the waiting push, so it was sent earlier. Around a circle, each push would be sent before
    itself.
    """

    def __init__(self, workers: Iterable[int], max_staleness: int | None) -> None:
        self.workers = tuple(workers)
        self.made = 0  # updates so far
        self.staleness: Counter[int] = Counter()  # a histogram: staleness -> pushes
        self._bound = max_staleness
        self.pulled = dict.fromkeys(self.workers, 0)  # worker -> updates that its parameters contain
        self.waiting: dict[int, int] = {}  # worker -> the same for its waiting push; in order of arrival

    def pull(self, worker: int) -> None:
        """The worker gets the newest parameters."""
        self.pulled[worker] = self.made

    def push(self, worker: int) -> None:
        """The worker's gradients have arrived."""
        self.waiting[worker] = self.pulled[worker]

    def has_pushed(self, worker: int) -> bool:
        """Whether the worker has pushed gradients that no update contains yet."""
        return worker in self.waiting

    def leave(self, worker: int) -> None:
        """The worker is done or dead, so nobody waits for it. What it has pushed still counts."""
        del self.pulled[worker]

    def next(self) -> list[int]:
        """Make the next update and return the workers whose pushes it contains; [] if it has to wait."""
        following = self.made + 1
        computing = self.pulled.keys() - self.waiting.keys()
        if not self.waiting or any(self.late(self.pulled[worker], following) for worker in computing):
            return []
        first = next(iter(self.waiting))
        together = [w for w, pulled in self.waiting.items() if self.late(pulled, following)] or [first]
        together.sort()  # a sum in order of arrival could differ in the last bit from run to run
        for worker in together:
            self.staleness[self.made - self.waiting.pop(worker)] += 1
            if worker in self.pulled:
                self.pulled[worker] = following
        self.made = following
        return together

    def late(self, pulled: int, updates: int) -> bool:
        """Whether update number `updates` is too late for gradients of parameters with `pulled` updates."""
        return self._bound is not None and updates - pulled > self._bound
