"""SIGTERM is no crash, but a request: a scheduler or a spot machine sends it some seconds before it kills.

While there is nothing to save yet, `Stopped` ends the program; later whoever trains asks whether SIGTERM
came, saves, and leaves. Imports nothing large, so that a command can be ready for it from its first moment.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 143
"""The exit code after SIGTERM: 128 + 15, as shells count."""


class Stopped(SystemExit):
    """SIGTERM ended the program where nothing was left to save. Uncaught, the exit code is 143."""

    def __init__(self, message: str) -> None:
        super().__init__(STOPPED)
        self.message = message


@contextmanager
def termination(handle: Callable[[], None] | None = None) -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM does not end this process: what is given says whether it came.

    handle: called when it comes. Only the main thread can take signals; in another nothing changes.
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
    """Stop at once: training has not begun."""
    raise Stopped("stopped by SIGTERM before training began; the same command starts it")
