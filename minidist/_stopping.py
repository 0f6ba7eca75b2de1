"""Treat SIGTERM as a request to stop: a scheduler or a spot machine sends it some seconds before it kills.

Before there is anything to save, `Stopped` ends the program. Later the training loop asks whether SIGTERM has
arrived, saves, and exits. This file imports nothing large, so a command can be ready from its first moment.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED, INTERRUPTED = 143, 130
"""The exit codes after SIGTERM and after Ctrl-C: 128 + 15 and 128 + 2, as shells count."""


class Stopped(SystemExit):
    """A signal stops the program; the message says how to go on. Uncaught, it ends Python with `code`."""

    def __init__(self, message: str, code: int = STOPPED) -> None:
        super().__init__(code)
        self.message = message


@contextmanager
def termination(handle: Callable[[], None] | None = None) -> Iterator[Callable[[], bool]]:
    """Inside this context SIGTERM only calls `handle`; the yielded function says whether SIGTERM has arrived.

    Only the main thread can handle signals; in any other thread nothing changes.
    """
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if handle is not None:
            handle()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def give_up() -> None:
    """Stop at once, because training has not begun."""
    raise Stopped("stopped by SIGTERM before training began; the same command starts it")
