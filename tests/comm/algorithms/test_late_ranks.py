"""Steps run over the slowest transport possible: it moves a message only when every rank waits.

All ranks are threads of this process. A rank that forgets to wait for something goes wrong here every time,
where over sockets it does once in a while. A rank that waits for what never comes is found at once.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidist.comm import algorithms
from minidist.comm.algorithms import CollectiveSchedule, Message, Step
from minidist.comm.algorithms.proof import run
from tests.helpers.clocks import HANG

execute = importlib.import_module("minidist.comm.algorithms.execute")
ELEMENTS = 24


@dataclass(eq=False)
class Work:
    transport: LateTransport
    data: torch.Tensor
    done: bool = False
    awaited: bool = False

    def wait(self) -> None:
        self.transport.wait(self)


@dataclass
class LateTransport:
    """What execute needs of torch.distributed, between threads."""

    ranks: int
    seed: int
    sends: dict[tuple[int, int], list[Work]] = field(default_factory=dict)
    receives: dict[tuple[int, int], list[Work]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changed, self.here = threading.Condition(), threading.local()
        self.choices, self.blocked, self.live = random.Random(self.seed), 0, self.ranks

    def get_rank(self, group: object = None) -> int:
        return int(self.here.rank)

    def isend(self, data: torch.Tensor, group: object, tag: int, group_dst: int) -> Work:
        return self.post(self.sends, (self.here.rank, group_dst), data)

    def irecv(self, data: torch.Tensor, group: object, tag: int, group_src: int) -> Work:
        return self.post(self.receives, (group_src, self.here.rank), data)

    def post(
        self, queues: dict[tuple[int, int], list[Work]], pair: tuple[int, int], data: torch.Tensor
    ) -> Work:
        with self.changed:
            work = Work(self, data)
            queues.setdefault(pair, []).append(work)
            return work

    def wait(self, work: Work) -> None:
        with self.changed:
            if not work.done:
                work.awaited = True
                self.blocked += 1
            while not work.done:
                if self.blocked < self.live:
                    assert self.changed.wait(HANG)
                    continue
                ready = sorted(
                    pair for pair, queue in self.sends.items() if queue and self.receives.get(pair)
                )
                if not ready:
                    raise RuntimeError("deadlock")
                pair = self.choices.choice(ready)
                send, receive = self.sends[pair].pop(0), self.receives[pair].pop(0)
                receive.data.copy_(send.data)
                for end in (send, receive):
                    end.done = True
                    self.blocked -= end.awaited
                self.changed.notify_all()

    def run(self, rank: int, function: Callable[[], object]) -> None:
        self.here.rank = rank
        try:
            function()
        finally:
            with self.changed:
                self.live -= 1
                self.changed.notify_all()


def run_late(
    one: CollectiveSchedule, buffers: list[torch.Tensor], segment: int, ahead: int, seed: int
) -> None:
    transport = LateTransport(one.ranks, seed)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(one.ranks) as pool:
        patch.setattr(execute, "dist", transport)
        patch.setattr(execute, "AHEAD", ahead)
        patch.setattr(execute, "SEGMENT_BYTES", (8 * segment, 16 * segment))
        runs = [
            pool.submit(transport.run, rank, partial(execute.execute, steps, buffers[rank], buffers[rank]))
            for rank, steps in enumerate(one.steps)
        ]
        for each in as_completed(runs, HANG):
            each.result()


@st.composite
def rounds(draw: st.DrawFn) -> CollectiveSchedule:
    """Any messages, in rounds that all ranks make: no algorithm, but right by the rules of a step."""
    ranks = draw(st.integers(2, 4))
    steps: list[list[Step]] = [[] for _ in range(ranks)]
    for _ in range(draw(st.integers(1, 6))):
        sends: list[list[Message]] = [[] for _ in range(ranks)]
        receives: list[list[Message]] = [[] for _ in range(ranks)]
        for _ in range(draw(st.integers(1, 5))):
            sender, receiver = draw(st.permutations(range(ranks)))[:2]
            start = draw(st.integers(0, ELEMENTS - 1))
            stop = draw(st.integers(start, ELEMENTS))
            sends[sender].append(Message(receiver, start, stop))
            receives[receiver].append(Message(sender, start, stop, draw(st.booleans())))
        for rank in range(ranks):
            if sends[rank] or receives[rank]:
                steps[rank].append(Step(tuple(sends[rank]), tuple(receives[rank])))
    return CollectiveSchedule("all_reduce", ELEMENTS, tuple(map(tuple, steps)))


def overwritten_early() -> CollectiveSchedule:
    """Rank 0 awaits data from rank 1, and then sends it on with data that rank 2 overwrites after that."""
    receives = Message(1, 0, 1), Message(2, 1, 2)
    own = Step(receives=receives[:1]), Step((Message(1, 0, 2),)), Step(receives=receives[1:])
    other = Step((Message(0, 0, 1),)), Step(receives=(Message(0, 0, 2),))
    return CollectiveSchedule("all_reduce", ELEMENTS, (own, other, (Step((Message(0, 1, 2),)),)))


@settings(max_examples=200, deadline=None)
@example(one=overwritten_early(), segment=1, ahead=2, seed=0)
@given(one=rounds(), segment=st.integers(1, 9), ahead=st.integers(1, 6), seed=st.integers(0, 1000))
def test_any_steps_give_what_their_rules_say(
    one: CollectiveSchedule, segment: int, ahead: int, seed: int
) -> None:
    begin = [np.random.default_rng(seed + rank).integers(0, 2**40, ELEMENTS) for rank in range(one.ranks)]
    wanted, buffers = [x.copy() for x in begin], [torch.from_numpy(x.copy()) for x in begin]
    for _ in run(one, wanted, wanted):
        pass
    run_late(one, buffers, segment, ahead, seed)
    for actual, expected in zip(buffers, wanted, strict=True):
        torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(algorithms.ALGORITHMS["all_reduce"]))
@pytest.mark.parametrize("ranks", [2, 3, 6, 8])
def test_algorithms_run_however_late(name: str, ranks: int) -> None:
    options: dict[str, Any] = {"node": 2} if name == "hierarchical" else {}
    one = algorithms.schedule("all_reduce", name, ranks, ELEMENTS, **options)
    for seed in range(5):
        buffers = [torch.arange(ELEMENTS) * 2**rank for rank in range(ranks)]
        run_late(one, buffers, 1 + seed, 1 + seed, seed)
        for buffer in buffers:
            torch.testing.assert_close(buffer, torch.arange(ELEMENTS) * (2**ranks - 1), rtol=0, atol=0)


def test_a_rank_that_waits_for_ever_is_found() -> None:
    one = algorithms.schedule("all_reduce", "ring", 2, ELEMENTS)
    one = CollectiveSchedule("all_reduce", ELEMENTS, (one.steps[0], one.steps[1][:1]))
    with pytest.raises(RuntimeError, match="deadlock"):
        run_late(one, [torch.arange(ELEMENTS) for _ in range(2)], 4, 2, 0)
