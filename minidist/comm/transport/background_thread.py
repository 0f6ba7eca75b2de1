"""Collectives under way while this rank computes: a thread that runs them in the order of their calls."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch


class Task:
    """A collective that the thread runs, as torch's handles look: `wait` and `is_completed`.

    Attributes:
        began, completed: `time.perf_counter()` when it was run and when it was complete; None before.
    """

    def __init__(self, run: Callable[[], object], event: threading.Event | None = None) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._event = event  # set when it is complete; None where it is run before anybody can wait
        self.began: float | None = None
        self.completed: float | None = None

    def run(self) -> None:
        """Run it, here and now; an error is kept for those who wait."""
        self.began = time.perf_counter()
        try:
            # Elsewhere no tensor may be written to that was made in this mode; inside it all may be.
            with torch.inference_mode():
                self._run()
        except BaseException as error:
            self._error = error
        del self._run  # it holds tensors
        self.completed = time.perf_counter()
        if self._event is not None:
            self._event.set()

    def wait(self) -> None:
        """Wait until it is complete. The collective's own time limit bounds this, too."""
        if self._event is not None:
            self._event.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """True where `wait` would not block."""
        return self.completed is not None


class Background:
    """Runs collectives one after the other: asynchronous ones in a thread, others where they are called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task | None = None

    def start(self, run: Callable[[], object]) -> Task:
        """Run it in the thread, after all that came before."""
        task = Task(run, threading.Event())
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._last = task
        self._queue.put(task)
        return task

    def here(self, run: Callable[[], object]) -> Task:
        """Run it, after all that came before; in this thread where nothing is under way."""
        if self._last is not None and not self._last.is_completed():
            return self.start(run)
        task = Task(run)
        task.run()
        return task

    def stop(self) -> None:
        """End the thread once what it was given is done."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # its tensors, while the queue is empty
