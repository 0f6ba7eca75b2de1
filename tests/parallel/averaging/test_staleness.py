"""The rule by which a parameter server makes updates, in worlds that are simulated message by message."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.parallel.averaging.staleness import Updates


class World:
    """Workers that pull from all servers, compute, and push to all; messages arrive in any order."""

    def __init__(self, workers: int, servers: int, bound: int | None, steps: int, seed: int) -> None:
        self.bound, self.draw = bound, random.Random(seed)
        self.servers = [Updates(range(workers), bound) for _ in range(servers)]
        self.left = dict.fromkeys(range(workers), steps)
        self.mail: list[list[list[str]]] = [[["pull"] for _ in range(workers)] for _ in range(servers)]
        self.unanswered = dict.fromkeys(range(workers), servers)  # of its last pull
        self.together: list[list[int]] = []

    def actions(self) -> list[tuple[int, int]]:
        """Messages that a server can take now, and (-1, worker) for a worker that has computed."""
        waiting = [
            (s, w)
            for s, boxes in enumerate(self.mail)
            for w, box in enumerate(boxes)
            if box and not (box[0] == "pull" and self.servers[s].has_pushed(w))
        ]
        return waiting + [(-1, w) for w, n in self.unanswered.items() if n == 0 and self.left[w] >= 0]

    def act(self, server: int, worker: int) -> None:
        if server < 0:
            self.left[worker] -= 1
            last = self.left[worker] < 0
            self.unanswered[worker] = len(self.servers)
            for boxes in self.mail:
                boxes[worker] += ["leave"] if last else ["push", "pull"]
            return
        updates, message = self.servers[server], self.mail[server][worker].pop(0)
        getattr(updates, message)(worker)
        if message == "pull":
            self.unanswered[worker] -= 1
        while together := updates.next():
            self.together.append(together)

    def run(self) -> None:
        while actions := self.actions():
            self.act(*self.draw.choice(actions))
        assert all(left < 0 for left in self.left.values()), "workers wait for each other in a circle"


worlds = {
    "workers": st.integers(1, 5),
    "servers": st.integers(1, 3),
    "steps": st.integers(0, 6),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=300, deadline=None)
@given(**worlds, bound=st.sampled_from([None, 0, 1, 2, 5]))
def test_every_push_is_used_in_time_and_nobody_waits_forever(
    workers: int, servers: int, steps: int, seed: int, bound: int | None
) -> None:
    world = World(workers, servers, bound, steps, seed)
    world.run()
    for updates in world.servers:
        assert updates.staleness.total() == workers * steps
        assert max(updates.staleness, default=0) <= (workers * steps if bound is None else bound)
    if bound is None:
        assert all(len(together) == 1 for together in world.together)
    if bound == 0:
        assert world.together == [[*range(workers)]] * steps * servers


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    updates = Updates([5, 7], max_staleness=0)
    for worker in (5, 7):
        updates.pull(worker)
    updates.push(5)
    assert updates.next() == []
    assert updates.has_pushed(5)
    updates.leave(7)
    assert updates.next() == [5]
    assert updates.next() == []
