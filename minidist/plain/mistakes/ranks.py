"""Ranks as threads of this process: what a rung imports as `comm`, without processes, for small trainings.

Every rank has a `Rank`, with the calls of `minidist.comm` that the ladder makes, and its own copy of the
rung. A collective is a row of tensors, to which each rank adds its own. Bytes are those of the table in
`minidist.plain`. Where calls do not fit together, or all ranks wait for each other, `Stuck` says so at once:
in a world of processes they would wait for ever, or get wrong numbers without a word.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.debugging.detectors import Call


class Stuck(RuntimeError):
    """The ranks' calls do not fit together."""


class Work:
    """A call under way."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.wait = finish


class World:
    """What n ranks share: the tensors of their calls, and who waits for which."""

    def __init__(self, n: int) -> None:
        self.n, self.changed, self.stuck = n, threading.Condition(), ""
        self.rows: dict[Any, dict[int, Any]] = {}  # of a collective or a message, by rank
        self.waiting: dict[threading.Thread, tuple[Call, Callable[[], bool]]] = {}
        self.running: list[threading.Thread] = []

    def put(self, key: Any, rank: int, *value: Any) -> None:
        """Add a rank's tensor to a row."""
        with self.changed:
            self.rows.setdefault(key, {})[rank] = value
            self.changed.notify_all()

    def get(self, key: Any, many: int, call: Call) -> dict[int, Any]:
        """Wait until a row has so many tensors."""
        me = threading.current_thread()
        with self.changed:
            self.waiting[me] = call, lambda: len(self.rows.get(key, ())) >= many
            while not self.waiting[me][1]():
                if all(rank in self.waiting and not self.waiting[rank][1]() for rank in self.running):
                    each = (f"{rank.name} in {self.waiting[rank][0]}" for rank in self.running)
                    self.stuck = self.stuck or f"all that still run wait for each other: {', '.join(each)}"
                    self.changed.notify_all()
                if self.stuck:
                    raise Stuck(self.stuck)
                self.changed.wait()
            del self.waiting[me]
            return self.rows[key]


class Rank:
    """One rank's `comm`."""

    Work = Work

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.number, self.calls = world, rank, list[Call]()
        self.begun = threading.Event()  # set by the first call; random numbers are drawn before, in turn
        self.count: Counter[Any] = Counter()  # collectives, and messages between each two ranks
        self.rank, self.size = lambda: rank, lambda: world.n
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"):
            setattr(self, name, partial(self.collective, name))

    def collective(
        self, name: str, x: Tensor, given: Any = None, *_: Any, out: Any = None, async_op: bool = False
    ) -> Any:
        """Take part in a collective. given: "mean", or the source, or how many rows go to each rank."""
        n, rank, size = self.world.n, self.number, x.nbytes
        rows = (given or [len(x) // n] * n) if name == "all_to_all" else []
        sent = {
            "all_reduce": 2 * (n - 1) * size // n,
            "reduce_scatter": (n - 1) * size // n,
            "all_gather": (n - 1) * size,
            "broadcast": (n - 1) * size * (rank == (given or 0)),
            "all_to_all": sum(rows[:rank] + rows[rank + 1 :]) * (size // max(1, len(x)) if rows else 0),
        }
        key, call = self._next("all"), Call(name, tuple(x.shape), sent[name])
        self.world.put(key, rank, call, x.detach().clone(), rows)
        self._note(call)

        def finish() -> Tensor:
            row = self.world.get(key, n, call)
            calls, parts, goes = zip(*(row[other] for other in range(n)), strict=True)
            for other, theirs in enumerate(calls):
                if theirs.name != name or (not rows and theirs.shape != call.shape):
                    raise Stuck(f"rank {rank} calls {call} where rank {other} calls {theirs}")
            with torch.no_grad():
                if name == "broadcast":
                    return x.copy_(parts[given or 0])
                if name == "all_to_all":
                    whole = torch.cat([p.split(g)[rank] for p, g in zip(parts, goes, strict=True)])
                elif name == "all_gather":
                    whole = torch.cat(parts)
                else:
                    whole = torch.stack(parts).sum(0) / (n if given == "mean" else 1)
                    whole = whole.chunk(n)[rank].clone() if name == "reduce_scatter" else whole
                into = x if name == "all_reduce" else out
                return whole.to(x.dtype) if into is None else into.copy_(whole)

        return Work(finish) if async_op else finish()

    def send(self, x: Tensor, destination: int, tag: int = 0, async_op: bool = False) -> Any:
        """Send a tensor to another rank, without waiting for it."""
        call = Call("send", tuple(x.shape), x.nbytes)
        self.world.put(self._next((self.number, destination, tag)), self.number, call, x.detach().clone())
        self._note(call)
        return Work(lambda: x) if async_op else x

    def recv(self, x: Tensor, source: int, tag: int = 0, async_op: bool = False) -> Any:
        """Receive what another rank sends."""
        key, call = self._next((source, self.number, tag)), Call("recv", tuple(x.shape), 0)
        self._note(call)

        def finish() -> Tensor:
            [(sent, value)] = self.world.get(key, 1, call).values()
            if sent.shape != call.shape:
                raise Stuck(f"rank {self.number} expects {call} and rank {source} sends {[*sent.shape]}")
            with torch.no_grad():
                return x.copy_(value)

        return Work(finish) if async_op else finish()

    def _next(self, what: Any) -> tuple[Any, int]:
        self.count[what] += 1
        return what, self.count[what]

    def _note(self, call: Call) -> None:
        self.calls.append(call)
        self.begun.set()


def on_ranks(n: int, run: Callable[[Rank], Any]) -> tuple[list[Any], list[Rank], str]:
    """Run a function on n ranks. Return the results, the ranks, and what went wrong."""
    world, results, failed, torch_threads = World(n), [None] * n, list[str](), torch.get_num_threads()
    ranks, ended = [Rank(world, rank) for rank in range(n)], SimpleQueue[int]()

    def body(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            if rank:
                ranks[rank - 1].begun.wait()
            results[rank] = run(ranks[rank])
        except Exception as error:  # a mistake may raise anything
            failed.append(f"rank {rank}: {type(error).__name__}: {error}")
            world.stuck = world.stuck or f"rank {rank} has failed"
        finally:
            ranks[rank].begun.set()
            with world.changed:
                world.running.remove(threading.current_thread())
                world.changed.notify_all()
            ended.put(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)
    ]
    world.running = [*threads]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:  # not join, which takes a thread for ended once Ctrl-C has interrupted it
            ended.get()
    except KeyboardInterrupt:  # Python must not end while they compute: torch's C++ would abort it
        with world.changed:
            world.stuck = "stopped"
            world.changed.notify_all()
        while any(thread.ident is not None for thread in world.running):  # which have started
            time.sleep(0.01)
        raise
    finally:
        torch.set_num_threads(torch_threads)
    return results, ranks, failed[0] if failed else ""
