"""Wait for the ranks' results; if ranks fail, find out which failed first, and why.

When one rank fails, the others fail a moment later in collectives whose peer is gone. A message is useful if
it names the first cause, which need not be the first report.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from minidist.comm.errors import FOLLOWS, RankDied, RankError, RankTimeout
from minidist.comm.launching.channel import wait_for
from minidist.comm.launching.rank_processes import RankProcess, signal_name
from minidist.comm.launching.worker import Raised

SETTLE = 0.1
"""Seconds from the first report of a failure to the verdict. When a rank is killed, its peers may report
their broken connections before the supervisor reports the death."""
CAUSE_PAUSE = 5.0
"""Seconds that a rank's failure gets to arrive, after a peer reported that it follows from that failure."""
STACK_PAUSE = 0.2
"""Seconds that a stuck rank gets to write its stack."""


class Failure(NamedTuple):
    """A rank that raised an exception, or that died if `raised` is None."""

    when: float
    process: RankProcess
    raised: Raised | None


def collect(
    processes: Sequence[RankProcess],
    wanted: str,
    limit: float | None,
    remedy: str,
    may_fail: Collection[int] = (),
) -> list[Any]:
    """Send what is queued, and return the values of the ranks' `wanted` messages, in rank order.

    Waits until every rank has sent one, and prints what ranks print. remedy: the argument that sets the
    limit, for the error. may_fail: ranks whose error counts as their result.

    Raises RankError if a rank raised, RankDied if its process ended, and RankTimeout after `limit` seconds.
    """
    deadline = None if limit is None else time.monotonic() + limit
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    while len(results) < len(processes):
        connections = (each for process in processes for each in (process.status, process.channel))
        left = None if deadline is None else deadline - time.monotonic()
        ready = wait_for([each for each in connections if not each.ended], left)
        if not ready:
            break
        for process in processes:
            if process.status in ready:
                process.read_status()
            for kind, *values in map(pickle.loads, process.channel.messages()):
                if kind == "print":
                    _print_labelled(process.rank, *values)
                elif kind == "raised":
                    failures.setdefault(process.rank, Failure(values[0].when, process, values[0]))
                elif kind == wanted:
                    results[process.rank] = values[0] if values else None
            if process.exit_code is not None:
                failures.setdefault(process.rank, Failure(time.monotonic(), process, None))
        for rank in failures.keys() & set(may_fail):
            failure = failures.pop(rank)
            results.setdefault(rank, _first_cause([failure]))
            failure.process.kill()  # if it only raised, its peers must still notice
        if failures:
            pause = CAUSE_PAUSE if all(map(_follows, failures.values())) else SETTLE
            settled = min(failure.when for failure in failures.values()) + pause
            deadline = settled if deadline is None else min(deadline, settled)

    if failures:
        raise _first_cause(list(failures.values()))
    if len(results) < len(processes):
        stuck = [process for process in processes if process.rank not in results]
        raise _timed_out(stuck, limit or 0.0, remedy)
    return [results[process.rank] for process in processes]


def _print_labelled(rank: int, stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    if out is None:  # the caller has no such stream
        return
    label = f"[rank {rank}] "
    text = "".join(f"{label}{line}\n" for line in text.removesuffix("\n").split("\n"))
    encoding = getattr(out, "encoding", None) or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))
    out.flush()


def _follows(failure: Failure) -> bool:
    """Whether it is an exception that follows from another rank's failure."""
    return failure.raised is not None and failure.raised.summary.endswith(FOLLOWS)


def _first_cause(failures: list[Failure]) -> RankError:
    """Return the error to raise: of the failures seen together, the one that caused the others.

    A death comes first: it causes exceptions in the peers, and a peer's exception cannot cause it. An
    exception that follows from one that a peer reported comes last, whenever it was raised.
    """

    def order(failure: Failure) -> tuple[bool, bool, float]:
        return failure.raised is not None, _follows(failure), failure.when

    failures.sort(key=order)
    first, others = failures[0], failures[1:]
    rank = first.process.rank
    later = ", ".join(map(str, sorted(failure.process.rank for failure in others)))
    also = f" (then rank {later} failed too)" if others else ""
    if first.raised is None:
        return _death(first.process, also)
    summary = f"rank {rank} raised {first.raised.summary}{also}"
    error = RankError(summary, rank=rank, traceback=first.raised.traceback)
    if first.raised.exception is not None:
        with contextlib.suppress(Exception):  # the caller may be unable to import its class
            error.__cause__ = pickle.loads(first.raised.exception)
    return error


_HINTS = {
    "SIGILL": ": by an instruction that this CPU lacks; `minidist doctor` says whether bfloat16 brings one",
    "SIGKILL": ": by `kill -9`, or by the system because memory ran out",
    "SIGABRT": (
        ": a library gave up and wrote why above; most often ranks call a collective with different shapes "
        "or dtypes"
    ),
}


def _death(process: RankProcess, also: str) -> RankDied:
    code = process.exit_code or 0
    if process.failure is not None:
        message = f"rank {process.rank} has no process: {process.failure}"
        return RankDied(message, rank=process.rank, exit_code=code, signal=None)
    if code >= 0:
        message = f"rank {process.rank} ended with exit code {code} before it returned{also}"
        return RankDied(message, rank=process.rank, exit_code=code, signal=None)
    name = signal_name(-code)
    message = f"rank {process.rank} was killed by {name}{_HINTS.get(name, '')}{also}"
    return RankDied(message, rank=process.rank, exit_code=code, signal=name)


def _timed_out(stuck: list[RankProcess], limit: float, remedy: str) -> RankTimeout:
    for process in stuck:
        process.signal(signal.SIGUSR1)
    time.sleep(STACK_PAUSE)
    stacks = "\n".join(
        f"rank {process.rank} was at:\n{process.stack() or '  (it did not respond)'}" for process in stuck
    )
    names = ", ".join(str(process.rank) for process in stuck)
    message = (
        f"rank {names} had not returned within {limit:g} s and was stopped; "
        f"give a longer {remedy}= if the work needs it"
    )
    return RankTimeout(message, rank=stuck[0].rank, traceback=stacks)
