"""Run an answer on ranks: many inputs in one go, and what goes wrong told in the reader's terms.

Checks have warm ranks of their own, one small world for each number of ranks, started at first use. They
compare their calls (`md.Cluster(check=True)`), so that ranks that wait for each other are an error at once,
which says who waits where. A rank that dies is replaced.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import minidist as md
from checks.support.answers import Answer, line_of_cell
from checks.support.unanswered import functions_of
from checks.support.verdicts import wrong
from checks.support.words import described, plural
from minidist import comm
from minidist.comm.launching.supervisor import preload_optimizers
from minidist.comm.ledgers import Call

LIMIT = 30.0
"""Seconds that the inputs of one check may take on one number of ranks."""
MOST = 1 << 30
"""Bytes that a rank may take in a check beside what it has; a list that grows without end meets them."""

RULE = re.compile(
    r"; (all ranks of a group have to make the same calls.*|look there, or give a longer timeout=)$"
)
"""What comm adds where ranks wait for each other; the lesson says it in its own words."""
_MEETING = r"barrier with ranks [\d, ]+ at \S*checks/ranks\.py:\d+"
MET = (
    (re.compile(rf"(rank \d+) waits for rank \d+ in {_MEETING}"), r"\1 has returned from its function"),
    (re.compile(rf"(rank \d+) {_MEETING}"), r"\1 has returned from its function"),
    (re.compile(rf"its last call was {_MEETING}"), "it has made no call"),
    (re.compile(rf"waits for it in {_MEETING}"), "has returned from its function"),
    (re.compile(rf"(?<= s )in {_MEETING}"), "for the others to return"),
)
"""The ranks meet after each case; who has come there has returned from the reader's function."""

preload_optimizers()

_worlds: dict[int, md.Cluster] = {}


@dataclass
class Case:
    """One input: the arguments of each rank."""

    args: Sequence[tuple[Any, ...]]  # one tuple a rank
    says: str = ""  # "3 ranks, 5 elements"; where it is empty, rank 0's arguments are shown


@dataclass
class Run:
    """What came of a case."""

    case: Case
    results: list[Any]  # each rank's
    args: list[tuple[Any, ...]]  # each rank's, as the answer left them
    calls: list[list[Call]]  # each rank's calls of comm
    left: list[list[str]]  # the names of those that each rank began and never waited for

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent."""
        return sum(call.bytes_sent for call in self.calls[rank])

    def messages(self, rank: int) -> int:
        """How many messages a rank sent."""
        return sum(call.name == "send" for call in self.calls[rank])


class InCase(Exception):
    """An exception of the answer's, on its way to the caller: the case, its kind and text, and the lines."""


def world(ranks: int) -> md.Cluster:
    """Warm ranks that checks share."""
    # A rank that dies is told in a sentence; what torch's C++ warns of beside it would fill the notebook.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if ranks not in _worlds or _worlds[ranks].closed:
        _worlds[ranks] = md.Cluster(ranks, timeout=LIMIT, check=True)
    return _worlds[ranks]


def close() -> None:
    """End the ranks of all checks."""
    for each in _worlds.values():
        each.close()


def on_ranks(answer: Answer, cases: Sequence[Case], only: Sequence[str] = ()) -> list[Run]:
    """Run the answer on each case, in order; all cases have the same number of ranks.

    Args:
        answer: the reader's function; each rank calls it with its own arguments.
        cases: the smallest first, so that the first that fails is the one to tell of.
        only: the calls of comm that the exercise allows: ("send", "recv"); any where it is empty.

    Raises:
        WrongAnswer: a rank raised, waits for what never comes, or died.
    """
    ranks = len(cases[0].args)
    try:
        answers = world(ranks).run(_all_cases, answer.function, [case.args for case in cases])
    except md.RankTimeout as late:
        limit = world(ranks).timeout
        wrong(
            f"On {plural(ranks, 'rank')} it had not ended after {limit:.0f} s and was stopped.",
            *_where(late.traceback, answer.function),
        )
    except md.RankDied as died:
        wrong(f"On {plural(ranks, 'rank')}: {died.summary}. The next check has fresh ranks.")
    except md.RankError as error:
        wrong(*_told(error, cases, answer.function))
    runs = []
    for index, case in enumerate(cases):
        runs.append(Run(case, *map(list, zip(*(rank[index] for rank in answers), strict=True))))
    for run in runs:
        others = {call.name for calls in run.calls for call in calls} - set(only)
        if only and others:
            wrong(
                f"It calls comm.{min(others)}, and the exercise is to do without: "
                f"comm.{' and comm.'.join(only)} are all it needs."
            )
        for rank, left in enumerate(run.left):
            if left:
                wrong(
                    f"On {says(run.case)}, rank {rank} begins comm.{left[0]} and never waits for it.",
                    f"  work = comm.{left[0]}(..., async_op=True) needs a work.wait(): until then its "
                    "tensor is on its way, and must be neither changed nor read.",
                )
    return runs


def says(case: Case) -> str:
    """A case in words, for messages."""
    return case.says or f"{len(case.args)} ranks, rank 0's input {', '.join(map(described, case.args[0]))}"


def _all_cases(function: Callable[..., Any], cases: Sequence[Sequence[tuple[Any, ...]]]) -> list[Any]:
    """In a rank: each case's result, arguments as they are afterwards, calls, and those not waited for."""
    done = []
    for index, args in enumerate(cases):
        mine = args[md.rank()]
        try:
            with comm.ledger() as ledger, contextlib.redirect_stdout(io.StringIO()), _bounded():
                result = function(*mine)
        except Exception as error:
            lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
            raise InCase(index, md.rank(), type(error).__name__, str(error), lines) from None
        left = [call.name for call in ledger.calls if call.seconds == 0]  # known once a call was waited for
        done.append((result, mine, ledger.calls, left))
        try:
            comm.barrier()  # finds a rank that makes a call too few or too many in the same case
        except comm.CollectiveError as error:
            raise InCase(index, md.rank(), type(error).__name__, str(error), []) from None
    return done


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """In a rank: MOST bytes and no more, on Linux. The process is the check's own: a limit does no harm."""
    if not sys.platform.startswith("linux"):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm") as pages:
        now = int(pages.read().split()[5]) * resource.getpagesize()
    most = now + MOST
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _told(error: md.RankError, cases: Sequence[Case], function: Any) -> list[str]:
    cause = error.__cause__
    if not isinstance(cause, InCase):
        return [f"On {plural(len(cases[0].args), 'rank')}: {_in_cell(error.summary, function)}"]
    index, rank, kind, text, lines = cause.args
    files = {each.__code__.co_filename for each in functions_of(function)}
    mine = [line for line in lines if line[0] in files]
    where = [f"  at {line_of_cell(*mine[-1])}"] if mine else []
    if kind == "CollectiveError":
        return [f"On {says(cases[index])}: {_in_cell(text, function)}"]
    text = text or "it took more memory than a check gives" * (kind == "MemoryError")
    return [f"On {says(cases[index])}, rank {rank} raised {kind}: {text}", *where]


def in_words(error: md.RankError) -> str:
    """What went wrong on ranks, without a traceback: for a cell that shows an error on purpose."""
    text = re.sub(r"; all ranks of a group .*", "", str(error.__cause__ or error.summary))
    text = re.sub(r" at (\S*ipykernel\S+):(\d+)", lambda m: f" at {line_of_cell(m[1], int(m[2]))}", text)
    return re.sub(r"(?<=[:;]) (?=rank \d+ )", "\n  ", text)


def _in_cell(text: str, function: Any) -> str:
    """A message with its places as the reader knows them, a rank a line."""
    files = {each.__code__.co_filename for each in functions_of(function)}

    def place(found: re.Match[str]) -> str:
        name, line = found[1], int(found[2])
        return f" at {line_of_cell(name, line)}" if name in files else ""

    def ours(found: re.Match[str]) -> str:  # the check's own calls: the reader knows none of their names
        return found[0] if found[3] in files else found[1] + found[2]

    text = RULE.sub("", text).replace(
        "_all_cases returned a list that cannot be sent back", "what it returned cannot be sent back"
    )
    for pattern, words in MET:
        text = pattern.sub(words, text)
    text = re.sub(r"(\w+\[[^\]]*\]) \([^;]*?\)( (?:to|from) rank \d+) at (\S+?):\d+", ours, text)
    text = re.sub(r" at (\S+?):(\d+)", place, text).replace(" is, its last", " is busy, its last")
    return re.sub(r"(?<=[:;]) (?=rank \d+ )", "\n  ", text)


def _where(stacks: str, function: Any) -> list[str]:
    """Where ranks were, from the stacks of a time limit."""
    files = {each.__code__.co_filename for each in functions_of(function)}
    places = []
    for rank, stack in re.findall(r"rank (\d+) was at:\n(.*?)(?=\n?rank \d+ was at:|\Z)", stacks, re.DOTALL):
        lines = [
            (name, int(n)) for name, n in re.findall(r'File "(.+?)", line (\d+)', stack) if name in files
        ]
        if lines:
            places.append(f"  rank {rank} was at {line_of_cell(*lines[-1])}")
    return places or ["  Is there a loop that never ends?"]
