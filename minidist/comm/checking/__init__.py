"""`check=True`: ranks compare their calls, and a mismatch or a deadlock is an error that names both sides.

call_records         what a rank tells the others of a call; which calls contradict each other or are swapped
compare_calls        exchanges the records through the world's store, and compares them before a call begins
deadlock_detection   why a rank does not come: it left, waits in a circle, or is stuck at a line
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from minidist.comm.checking.compare_calls import Checker
from minidist.comm.ledgers import Call

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_checker: Checker | None = None
"""The check of the default world, where it has one."""


def start(store: Store, rank: int, ranks: int, limit: timedelta) -> None:
    """Check the calls of the world that is being joined; `limit` is the longest wait for a call's peers."""
    global _checker
    stop()
    _checker = Checker(store, rank, ranks, limit.total_seconds())
    atexit.register(stop)


def stop() -> None:
    """Stop checking, and tell the others that this rank makes no more calls."""
    global _checker
    if _checker is not None:
        checker, _checker = _checker, None
        atexit.unregister(stop)
        checker.close()


def enter(call: Call) -> Callable[[], None] | None:
    """Compare a call that is about to begin with those of the other ranks, if the world is checked.

    Returns what to call before the wait for the operation itself, or None if nothing is left to compare.
    """
    return None if _checker is None else _checker.enter(call)


@contextlib.contextmanager
def run(limit: float | None) -> Iterator[None]:
    """Count the calls of a function that all ranks run in `limit` seconds; tell the others when it ends."""
    checker = _checker
    if checker is None:
        yield
        return
    checker.begin(limit)
    how = "returned from its function"
    try:
        yield
    except BaseException as error:
        how = f"raised {type(error).__name__}"
        raise
    finally:
        if checker is _checker:
            checker.end(how)
