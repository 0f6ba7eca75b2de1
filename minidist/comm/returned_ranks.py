"""Find out that a rank has returned from the function that all ranks run, and so joins no more calls of it.

Its process stays, for the next function, and nothing about it looks wrong: ranks whose loops are longer would
wait for it until their time limit. Each rank counts in the world's store the functions from which it has
returned, and a rank that waits for long looks there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PAUSE = 0.5  # seconds between two looks for the same rank, and at most for one look
SLICE = timedelta(seconds=1)
"""How long to wait for a gloo collective before looking for ranks that have returned."""

_world: list[ReturnedRanks] = []
"""The counts of the world that this process has joined; empty outside one."""


class ReturnedRanks:
    """This rank's count, and its view of the others'."""

    def __init__(self, store: Store, own: int, only_gloo: bool) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined] # torch locks its own while it waits
        self._own, self._runs, self.only_gloo = own, 0, only_gloo
        self._looked: dict[int, float] = {}
        self._look: threading.Thread | None = None
        store.set(_key(own), "0")

    def end_run(self) -> None:
        """Say that this rank has returned once more."""
        self._runs += 1
        if self._is_asking():
            return
        with suppress(dist.DistError):  # the store is gone where another process held it
            self._store.set(_key(self._own), str(self._runs))

    def has(self, rank: int) -> bool:
        """Return whether a rank of the world is known to have returned from the function that this rank runs.

        A thread asks: if the store's host is gone, the store never answers, whatever the limit.
        """
        now = time.monotonic()
        if self._is_asking() or now - self._looked.get(rank, 0.0) < PAUSE:
            return False
        self._looked[rank] = now
        answers: list[bool] = []
        look = threading.Thread(target=self._ask, args=(rank, answers), daemon=True)
        look.start()
        self._look = look  # several threads of a rank may wait for messages, and look
        look.join(PAUSE)
        return any(answers)

    def _is_asking(self) -> bool:
        """Whether a look hangs: it holds the store's lock."""
        return self._look is not None and self._look.is_alive()

    def _ask(self, rank: int, answers: list[bool]) -> None:
        with suppress(dist.DistError):
            answers.append(int(self._store.get(_key(rank))) > self._runs)


def start(store: Store, own: int, only_gloo: bool) -> None:
    """Begin to count, in the world that is being joined. only_gloo: no tensor of it travels by NCCL."""
    _world[:] = [ReturnedRanks(store, own, only_gloo)]


def stop() -> None:
    """Forget the world, which has ended."""
    _world.clear()


def end_run() -> None:
    """Say that this rank has returned from the function that all ranks run."""
    for world in _world:
        world.end_run()


def why_absent(rank: int) -> str:
    """Return why a rank of the world will not come, in words; "" if it may. Asks the store now and then."""
    if not _world or not _world[0].has(rank):
        return ""
    return (
        f"rank {rank} has returned from its function, and will never join this call; let all ranks make the "
        "same calls, as with loops of equal length"
    )


def wait(handle: dist.Work, ranks: Sequence[int]) -> None:
    """Wait for a collective of torch.distributed; RuntimeError if one of its ranks has returned.

    gloo says neither who is missing nor who is still sending, so a rank that has returned gets one more
    `SLICE`, in which what it sent arrives. A time limit ends gloo's wait and not the collective; NCCL's would
    block the host.
    """
    if not _world or not _world[0].only_gloo:
        handle.wait()
        return
    reason = ""
    while True:
        try:
            handle.wait(SLICE)
        except RuntimeError as error:
            if "Operation timed out" not in str(error):  # gloo's own limit is worded in another way
                raise
            if reason:
                raise RuntimeError(reason) from None
            reason = next(filter(None, map(why_absent, ranks)), "")
        else:
            return


def _key(rank: int) -> str:
    return f"returned/{rank}"
