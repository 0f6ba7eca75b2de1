"""Time in tests: one limit for whatever may hang, and a clock that a test moves by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG = 300.0
"""Seconds after which something hangs. A test that passes never waits so long, even on a busy machine."""


def until(condition: Callable[[], object], limit: float = HANG) -> bool:
    """Wait until the condition holds; False if it does not in time."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class Clock(threading.local):
    """Stands in for the module `time`. Each thread has a clock of its own, which only `sleep` moves."""

    now = ran = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.ran

    def sleep(self, seconds: float) -> None:
        self.now += seconds
