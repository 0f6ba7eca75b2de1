"""Waiting for what the ranks answer, and saying which of them failed first, and why.

When one rank fails the others fail a moment later, in collectives whose peer is gone. Naming the first cause,
not the first report, is what makes the message useful.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from minidist.comm.errors import RankDied, RankError, RankTimeout
from minidist.comm.processes import RankProcess
from minidist.comm.worker import Raised

SETTLE = 0.1
"""Seconds from the first report of a failure to the verdict. When a rank is killed its peers' connections
break, and they may report that before the supervisor has reported the death."""
STACK_PAUSE = 0.2
"""Seconds that a stuck rank gets to write where it is."""


@dataclass(frozen=True)
class Failure:
    """A rank that raised, or that died where `raised` is None."""

    when: float
    process: RankProcess
    raised: Raised | None


def collect(processes: Sequence[RankProcess], wanted: str, limit: float | None) -> list[Any]:
    """Wait until every rank has answered `wanted`; the values in rank order. Prints what ranks print.

    Raises:
        RankError: a rank raised. RankDied: its process ended. RankTimeout: `limit` seconds have passed.
    """
    deadline = None if limit is None else time.monotonic() + limit
    answers: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    listening: dict[Connection, RankProcess] = {}
    for process in processes:
        listening[process.connection] = listening[process.status] = process

    while len(answers) < len(processes):
        ready = wait(list(listening), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for channel in [channel for channel in listening if channel in ready]:
            process = listening[channel]
            if channel is process.status:
                process.read_status()
                if process.exit_code is not None:
                    del listening[channel]
            for kind, *values in process.messages():
                if kind == "print":
                    _print_labelled(process.rank, *values)
                elif kind == "raised":
                    failures.setdefault(process.rank, Failure(values[0].when, process, values[0]))
                elif kind == wanted:
                    answers[process.rank] = values[0] if values else None
            if process.ended:
                listening.pop(process.connection, None)  # how it ended comes by its status
            if process.exit_code is not None:
                failures.setdefault(process.rank, Failure(time.monotonic(), process, None))
        if failures:
            settled = min(failure.when for failure in failures.values()) + SETTLE
            deadline = settled if deadline is None else min(deadline, settled)

    if failures:
        raise _first_cause(list(failures.values()))
    if len(answers) < len(processes):
        raise _timed_out([process for process in processes if process.rank not in answers], limit or 0.0)
    return [answers[process.rank] for process in processes]


def _print_labelled(rank: int, stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    label = f"[rank {rank}] "
    out.write("".join(label + line for line in text.splitlines(keepends=True)))
    out.flush()


def _first_cause(failures: list[Failure]) -> RankError:
    """The error to raise: of the failures seen together, the one that the others follow from.

    A death comes first: a peer's exception cannot cause it, while it causes exceptions in the peers.
    """
    failures.sort(key=lambda failure: (failure.raised is not None, failure.when))
    first, others = failures[0], failures[1:]
    rank = first.process.rank
    also = f" (then rank {_ranks(others)} failed too)" if others else ""
    if first.raised is None:
        return _death(first.process, also)
    summary = f"rank {rank} raised {first.raised.summary}{also}"
    error = RankError(summary, rank=rank, traceback=first.raised.traceback)
    if first.raised.exception is not None:
        error.__cause__ = pickle.loads(first.raised.exception)
    return error


def _death(process: RankProcess, also: str) -> RankDied:
    code = process.exit_code or 0
    if process.failure is not None:
        message = f"rank {process.rank} has no process: {process.failure}; what it wrote is above"
        return RankDied(message, rank=process.rank, exit_code=code, signal=None)
    if code >= 0:
        message = f"rank {process.rank} ended with exit code {code} before it returned{also}"
        return RankDied(message, rank=process.rank, exit_code=code, signal=None)
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    hint = ": by `kill -9`, or by the system because memory ran out" if name == "SIGKILL" else ""
    message = f"rank {process.rank} was killed by {name}{hint}{also}"
    return RankDied(message, rank=process.rank, exit_code=code, signal=name)


def _timed_out(stuck: list[RankProcess], limit: float) -> RankTimeout:
    for process in stuck:
        process.ask_stack()
    time.sleep(STACK_PAUSE)
    stacks = "\n".join(
        f"rank {process.rank} was at:\n{process.stack() or '  (it did not answer)'}" for process in stuck
    )
    names = ", ".join(str(process.rank) for process in stuck)
    message = (
        f"rank {names} had not returned within {limit:g} s and was stopped; "
        "give a longer timeout= if the work needs it"
    )
    return RankTimeout(message, rank=stuck[0].rank, traceback=stacks)


def _ranks(failures: list[Failure]) -> str:
    return ", ".join(str(failure.process.rank) for failure in sorted(failures, key=lambda f: f.process.rank))
