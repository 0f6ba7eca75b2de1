"""Call an answer: it is stopped in time, and its exceptions are told by the line of the reader's cell.

mine = Answer("shift", shift)
mine(x)                  # WrongAnswer where it raises, or takes more time or memory than it may
mine.expect(right, x)    # WrongAnswer also where it returns something else, or changes its argument
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import linecache
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

from checks.support.unanswered import functions_of
from checks.support.verdicts import Verdict, compare, same, wrong
from checks.support.words import described, first_lines

LIMIT = 20.0
"""Seconds that one call of an answer may take in this process."""
MOST = 2e9
"""Bytes that this process may grow by meanwhile."""
LOOK = 0.5
"""Seconds between two looks at both."""


class Limit(BaseException):
    """An answer took too much. No `except Exception` of the reader's takes it for an error of his own."""


class TimeLimit(Limit):
    """Too long."""


class MemoryLimit(Limit):
    """A list that grows without end, say: stopped before the machine has no memory left for the notebook."""


class Printed(io.TextIOBase):
    """What a call prints: its beginning is kept, for a message."""

    text = ""

    def write(self, text: str) -> int:
        """As a file does."""
        if len(self.text) < 1000:
            self.text += text[:1000]
        return len(text)


class Answer:
    """The reader's function: called as it is, it tells of its exceptions in the reader's terms.

    A function with Numba's @njit is called as the Python that it is: there an endless loop can be stopped.
    """

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function
        self.printed = Printed()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with a time limit; what it prints is kept for the message of a check that fails.

        Raises:
            WrongAnswer: it raised, or took too long.
        """
        self.printed = Printed()
        given = ", ".join([*map(described, args), *(f"{k}={described(v)}" for k, v in kwargs.items())])
        call = f"{self.name}({given})"
        try:
            with in_time(LIMIT), contextlib.redirect_stdout(self.printed):
                return as_python(self.function)(*args, **kwargs)
        except TimeLimit as late:
            place = reader_line(late, self.function)
            wrong(f"{call} had not ended after {LIMIT:.0f} s and was stopped{' at ' * bool(place)}{place}.")
        except MemoryLimit as much:
            place = reader_line(much, self.function)
            wrong(f"{call} took {MOST / 1e9:g} GB of memory and was stopped{' at ' * bool(place)}{place}.")
        except Verdict:
            raise
        except (Exception, SystemExit) as error:  # exit() in an answer ends the answer, and no notebook
            place = reader_line(error, self.function)
            lines = [f"  at {place}"] if place else []
            wrong(f"{call} raised {type(error).__name__}: {first_lines(error)}", *lines)

    def expect(
        self,
        expected: Any,
        *args: Any,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        wrongs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call it on copies, which it has to leave as they are; compare what it returns, and return that."""
        given = copy.deepcopy(args)
        call = ", ".join([*map(described, args), *(f"{k}={described(v)}" for k, v in kwargs.items())])
        got = self(*given, **kwargs)
        compare(got, expected, f"{self.name}({call})", rtol, atol, wrongs=wrongs)
        self.unchanged(f"{self.name}({call})", args, given)
        return got

    def unchanged(self, what: str, before: Sequence[Any], after: Sequence[Any]) -> None:
        """WrongAnswer where a call, named by `what`, has changed an argument."""
        function = next(functions_of(self.function), None)
        names = list(inspect.signature(function).parameters) if function else []
        for place, (was, now) in enumerate(zip(before, after, strict=True)):
            if not same(was, now):
                name = names[place] if place < len(names) else f"argument {place}"
                wrong(
                    f"{what} returns what it should, but changes {name}, which is the caller's: leave that "
                    "as it is, and put the result into a new array.",
                )


def reader_line(error: BaseException, function: Any, or_def: bool = True) -> str:
    """ "line 4 of your cell: total += x[i + 1]", the deepest line of the reader's in a traceback.

    Where there is none (a call with too many arguments never gets to one) it is the function's first, unless
    `or_def` is False; nothing where that is not known either.
    """
    functions = list(functions_of(function))
    files = {each.__code__.co_filename for each in functions}
    lines = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    mine = [line for line in lines if line[0] in files]
    if or_def:
        mine = mine or [(each.__code__.co_filename, _line_of_def(each)) for each in functions[:1]]
    return line_of_cell(*mine[-1]) if mine else ""


def _line_of_def(function: FunctionType) -> int:
    """Below its decorators."""
    first, file = function.__code__.co_firstlineno, function.__code__.co_filename
    while linecache.getline(file, first).lstrip().startswith("@"):
        first += 1
    return first


def as_python(function: Any) -> Any:
    """The Python function that Numba's @njit was given; any other as it is."""
    numba = sys.modules.get("numba")
    return function.py_func if numba is not None and numba.extending.is_jitted(function) else function


def line_of_cell(filename: str, line: int) -> str:
    """A line as the reader knows it."""
    text = linecache.getline(filename, line).strip()
    return f"line {line} of your cell" + (f": {text}" if text else "")


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """A Limit in what takes more: in the main thread, where signals arrive; a compiled loop is not cut."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline, most = time.monotonic() + seconds, peak() + MOST

    def look(number: int, frame: FrameType | None) -> None:
        late = time.monotonic() >= deadline
        rest = LOOK if late else min(LOOK, max(0.001, deadline - time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, rest)
        if frame is None or frame.f_code.co_filename in (__file__, contextlib.__file__):
            return  # on its way in or out: what is raised here would keep the timer from being taken away
        if late or peak() > most:
            limit = TimeLimit if late else MemoryLimit
            _raise_again(limit, frame)
            raise limit

    before, tracer = signal.signal(signal.SIGALRM, look), sys.gettrace()
    signal.setitimer(signal.ITIMER_REAL, min(LOOK, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.settrace(tracer)


def _raise_again(limit: type[Limit], frame: FrameType | None) -> None:
    """Raise once more, a few lines on, in the answer that a signal has met.

    A bare `except:` in an endless loop swallows what is raised within its `try:`, but not what is raised in
    the lines outside of it. Where the first is not swallowed no such line is reached.
    """
    lines = random.choice((1, 1, 2, 3, 5))

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines -= event == "line"
        if lines <= 0:
            raise limit
        return trace

    while frame is not None and frame.f_code.co_filename != __file__:
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(lambda frame, event, argument: None)  # functions that are called meanwhile are not traced


def peak() -> float:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
