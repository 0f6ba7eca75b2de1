"""The thread that runs a group's calls, and the order that its ranks keep.

torch.distributed runs its own collectives. Those of minidist run here, one at a time, in the order of their
calls; after one that has failed halfway no other runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from minidist.comm.groups import Group, known, process_group


class Failed(RuntimeError):
    """A collective failed here; the communication API adds to it what and where."""


class InStep:
    """Calls in which all ranks of a group take part; none runs after one that has failed halfway."""

    def __init__(self) -> None:
        self._broken = ""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a collective inside. After one has failed halfway, no other can run.

        Raises:
            Failed: a peer is gone, late, or makes another call; or an earlier call failed.
        """
        if self._broken:
            raise Failed(f"an earlier call on these ranks failed, and left them out of step: {self._broken}")
        try:
            yield
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise


class Task:
    """A collective to run, with `wait` and `is_completed` like torch's handles."""

    def __init__(self, run: Callable[[], object], event: threading.Event | None = None) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._event = event  # set at the end; None if it runs before anybody can wait
        self.began: float | None = None  # `time.perf_counter()` at its begin
        self.completed: float | None = None  # and at its end

    def run(self) -> None:
        """Run it now. `wait` raises its error."""
        self.began = time.perf_counter()
        try:
            # Only in inference mode may all tensors be written to, those made in it included.
            with torch.inference_mode():
                self._run()
        except BaseException as error:
            self._error = error
        del self._run  # it holds tensors
        self.completed = time.perf_counter()
        if self._event is not None:
            self._event.set()

    def wait(self) -> None:
        """Wait until it is complete. The collective's own time limit bounds the wait."""
        if self._event is not None:
            self._event.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.completed is not None


class Background(InStep):
    """Runs a group's collectives in order: asynchronous ones in its thread, others in the caller's.

    A group has one for all algorithms, since the hierarchical all-reduce sends messages as well: two
    collectives at once would mix them up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task | None = None

    def start(self, run: Callable[[], object]) -> Task:
        """Run a collective in the thread, after all earlier ones."""
        task = Task(run, threading.Event())
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="minidist collectives", daemon=True)
            self._thread.start()
        self._last = task
        self._queue.put(task)
        return task

    def here(self, run: Callable[[], object]) -> Task:
        """Run a collective after all earlier ones; in the caller's thread if none is under way."""
        if self._last is not None and not self._last.is_completed():
            return self.start(run)
        task = Task(run)
        task.run()
        return task

    def stop(self) -> None:
        """End the thread when it has run what it was given."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # frees its tensors while the thread waits


def background(group: Group) -> Background:
    """Return what runs a group's collectives, except torch's own, in the order of their calls."""
    record = known(group)
    if record.background is None:
        own = getattr(process_group(group), "background", Background)  # a dry run's group has its own
        record.background = own()
    found: Background = record.background
    return found
