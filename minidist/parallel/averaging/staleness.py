"""When a parameter server may make its next update, so that no gradient gets older than allowed.

Staleness is the number of updates between a worker's pull and the update that its push goes into. Bookkeeping
alone, with no tensor and no message in it: the server tells it who pulled, pushed and left, and asks whose
pushes make the next update. One rule covers all: *an update waits for every worker that it would make too
late, and takes with it every waiting push that it would make too old.* Without a bound each push is an update
by itself (Dean et al.'s Downpour). With bound 0 an update waits for all workers and takes all their pushes,
which is the synchronous parameter server. Between them lies Ho et al.'s stale synchronous parallel.

Sources: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
section 2, which bounds steps where this bounds updates; Li et al. 2014, "Scaling Distributed Machine Learning
with the Parameter Server", section 3.4 (bounded delay).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Updates:
    """The updates that one server has made, and which pushes may go into the next.

    A worker whose push has gone into an update is expected to pull next. It counts as having pulled that very
    update until it does, so that those which run ahead wait for it wherever it spends its time.

    Several servers decide each for itself, and their workers cannot wait for each other in a circle. Where a
    push to a server waits for another worker, that one's last push was in an update there before the pull
    that the waiting push follows, so it was sent earlier. Around a circle each would be sent before itself.

    Args:
        workers: who takes part.
        max_staleness: the bound; None for none.

    Attributes:
        workers: who takes part.
        made: updates so far.
        staleness: pushes by their staleness, a histogram.
    """

    def __init__(self, workers: Iterable[int], max_staleness: int | None) -> None:
        self.workers = tuple(workers)
        self.made = 0
        self.staleness: Counter[int] = Counter()
        self._bound = max_staleness
        self._pulled = dict.fromkeys(self.workers, 0)  # worker -> updates that its parameters hold
        self._waiting: dict[int, int] = {}  # worker -> the same for its push; in order of arrival

    def pull(self, worker: int) -> None:
        """The worker is given the newest parameters."""
        self._pulled[worker] = self.made

    def push(self, worker: int) -> None:
        """The worker's gradients have come."""
        self._waiting[worker] = self._pulled[worker]

    def waits(self, worker: int) -> bool:
        """True where a push of the worker's is not yet in an update."""
        return worker in self._waiting

    def leave(self, worker: int) -> None:
        """The worker is done or dead: nobody waits for it. What it has pushed still counts."""
        del self._pulled[worker]

    def next(self) -> list[int]:
        """The workers whose pushes make the next update, which counts as made; [] where it has to wait."""
        following = self.made + 1
        computing = self._pulled.keys() - self._waiting.keys()
        if not self._waiting or any(self._late(self._pulled[worker], following) for worker in computing):
            return []
        first = next(iter(self._waiting))
        together = [w for w, pulled in self._waiting.items() if self._late(pulled, following)] or [first]
        together.sort()  # a sum in the order of arrival would not be the same to the last bit in every run
        for worker in together:
            self.staleness[self.made - self._waiting.pop(worker)] += 1
            if worker in self._pulled:
                self._pulled[worker] = following
        self.made = following
        return together

    def _late(self, pulled: int, updates: int) -> bool:
        return self._bound is not None and updates - pulled > self._bound
