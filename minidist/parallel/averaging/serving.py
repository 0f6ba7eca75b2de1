"""The server side of a parameter server: read the workers' requests, make updates, and answer.

One thread for each worker puts its messages into a common queue; the main thread alone changes parameters and
answers. A thread each, because a receive cannot be asked whether it is complete, and a receive from any rank
does not notice that one rank has died; from a single rank, it ends with an error when that rank's process
does.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.parallel.averaging.parameter_assignment import ServerPart
from minidist.parallel.averaging.staleness import Updates


class Ask(IntEnum):
    """The kind of a worker's request, which is two integers, this and the rows of a push: 16 bytes."""

    PULL = 0
    PUSH = 1
    DONE = 2  # answered when all workers are done
    LEAVE = 3  # that answer has arrived


class Tag(IntEnum):
    """The kinds of messages."""

    REQUEST = 1
    GRADIENTS = 2
    VALUES = 3


class ServerReport(NamedTuple):
    """How a server's work went."""

    updates: int  # optimizer steps
    staleness: dict[int, int]  # {s: pushes that went into an update s updates after their pull}
    pushes: dict[int, int]  # {worker's rank: its pushes}
    died: tuple[int, ...]  # workers that ended before they were done, in the order in which it was noticed


class _Request(NamedTuple):
    """A worker's request as its thread read it, or the error that ended the thread."""

    worker: int
    what: int = Ask.LEAVE
    rows: int = 0
    gradients: Sequence[Tensor | None] = ()  # of a push: one for each parameter of the part
    error: BaseException | None = None


class Serving:
    """One server at work; server k is rank k, and has part k of `parts`."""

    def __init__(
        self,
        parts: Sequence[ServerPart],
        optimizer: torch.optim.Optimizer,
        workers: Sequence[int],
        max_staleness: int | None,
    ) -> None:
        self.parts, self.part, self.optimizer = parts, parts[comm.rank()], optimizer
        self.updates = Updates(workers, max_staleness)
        self.working, self.connected = set(workers), set(workers)
        self.died: list[int] = []
        self.pushes = Counter(dict.fromkeys(workers, 0))
        self._inbox: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._pulling: set[int] = set()  # workers that wait for parameters
        self._pushed: dict[int, _Request] = {}  # worker -> its push, until an update contains it
        self._sending: dict[int, comm.Work] = {}  # the last answer to each worker

    def run(self, after_update: Callable[[int], object] | None) -> ServerReport:
        """Serve until every worker is done or dead; see `ParameterServer.serve`."""
        for worker in self.updates.workers:
            threading.Thread(target=self._read, args=(worker,), daemon=True).start()
        while self.working:
            self._handle(self._inbox.get())
            while together := self.updates.next():
                self.update([self._pushed.pop(worker) for worker in together])
                if after_update is not None:
                    after_update(self.updates.made)
            for worker in [worker for worker in self._pulling if not self.updates.has_pushed(worker)]:
                self._pulling.remove(worker)
                self.updates.pull(worker)
                self._answer(worker)
        self._exchange()
        for worker in self.connected:
            self._answer(worker)
        while self.connected:
            self._handle(self._inbox.get())
        staleness = dict(sorted(self.updates.staleness.items()))
        return ServerReport(self.updates.made, staleness, dict(self.pushes), tuple(self.died))

    def _read(self, worker: int) -> None:
        """Pass on one worker's requests until it leaves or dies; runs in that worker's thread."""
        try:
            request = torch.zeros(2, dtype=torch.int64)
            while int(request[0]) != Ask.LEAVE:
                comm.recv(request, worker, Tag.REQUEST)
                what, rows = request.tolist()
                gradients: Sequence[Tensor | None] = ()
                if what == Ask.PUSH:
                    message = comm.recv(self.part.empty_gradients(), worker, Tag.GRADIENTS)
                    gradients = self.part.unpack_gradients(message)
                self._inbox.put(_Request(worker, what, rows, gradients))
        except BaseException as error:
            self._inbox.put(_Request(worker, error=error))

    def _handle(self, request: _Request) -> None:
        worker = request.worker
        if request.error is not None:
            self._worker_died(worker, request.error)
            return
        if worker in self._sending:
            self._sending.pop(worker).wait()  # the worker asks again, so this answer has arrived
        if request.what == Ask.PULL:
            self._pulling.add(worker)
        elif request.what == Ask.PUSH:
            self._pushed[worker] = request
            self.pushes[worker] += 1
            self.updates.push(worker)
        elif request.what == Ask.DONE:
            self.working.remove(worker)
            self.updates.leave(worker)
        else:
            self.connected.remove(worker)

    def _worker_died(self, worker: int, error: BaseException) -> None:
        """Go on without a worker that has died; raise any other error that ended its thread."""
        if not (isinstance(error, comm.CollectiveError) and error.peer_ended):
            raise error
        self.died.append(worker)
        self.connected.remove(worker)
        self._pulling.discard(worker)
        if worker in self.working:
            self.working.remove(worker)
            self.updates.leave(worker)
        if worker in self._sending:
            self._sending.pop(worker).forget()

    def update(self, pushes: list[_Request]) -> None:
        """Make an optimizer step with the mean of the gradients over the pushes' rows."""
        rows = sum(push.rows for push in pushes)
        for i, parameter in enumerate(self.part.parameters):
            parameter.grad = None  # stays None if no push has a gradient, as in one process
            for push in pushes:
                gradient = push.gradients[i]
                if gradient is None:
                    continue
                weighted = gradient.to(parameter.device).mul_(push.rows / rows)
                parameter.grad = weighted if parameter.grad is None else parameter.grad.add_(weighted)
        self.optimizer.step()

    def _answer(self, worker: int) -> None:
        """Send the current parameters; if the worker is dead, its thread will report it."""
        values = self.part.pack_values(self.updates.made)
        try:
            self._sending[worker] = comm.send(values, worker, Tag.VALUES, async_op=True)
        except comm.CollectiveError as error:
            if not error.peer_ended:
                raise

    def _exchange(self) -> None:
        """Send this server's final part to the other servers, and load theirs."""
        values = self.part.pack_values(self.updates.made)
        others = [rank for rank in range(len(self.parts)) if rank != comm.rank()]
        sending = [comm.send(values, rank, Tag.VALUES, async_op=True) for rank in others]
        for rank in others:
            self.parts[rank].load_values(comm.recv(self.parts[rank].empty_values(), rank, Tag.VALUES))
        for work in sending:
            work.wait()
