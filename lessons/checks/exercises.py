"""Exercises: `check` an answer, ask for a `hint`, go on with the answer `or_solution`.

    lesson = Lesson(8, "ranks_that_talk")
    check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

    @lesson.exercise("8.1", hints=("...", "...", "..."))
    def shift(answer, draw):  # the reader's function has the same name
        ...
        return Right(inputs=12, scores=(Score("Messages of each rank", 1, par=1),))

A checker calls `answer` as the reader's function is called, draws what it needs from `draw`, a NumPy
generator, and returns `Right` or ends in `wrong(...)`, `compare(...)` or `answer.expect(...)`. A score above
1.5 times par refuses the answer, with the score's idea in the message.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import numpy as np

from checks import progress
from checks.unanswered import functions_of, is_unanswered
from checks.verdicts import (
    Interrupted,
    NotAnswered,
    Right,
    Verdict,
    WrongAnswer,
    compare,
    described,
    first_lines,
    same,
    wrong,
)

LESSONS = Path(__file__).parent.parent
LIMIT = 20.0
"""Seconds that one call of an answer may take in this process."""
MOST = 2e9
"""Bytes that this process may grow by meanwhile."""
LOOK = 0.5
"""Seconds between two looks at both."""

if str(LESSONS) not in sys.path:  # ranks find `checks` and `solutions` by it, wherever they run
    sys.path.append(str(LESSONS))


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
            with _limit(LIMIT), contextlib.redirect_stdout(self.printed):
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

    def expect(self, expected: Any, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, **kwargs: Any) -> Any:
        """Call it on copies, which it has to leave as they are; compare what it returns, and return that."""
        given = copy.deepcopy(args)
        call = ", ".join([*map(described, args), *(f"{k}={described(v)}" for k, v in kwargs.items())])
        got = self(*given, **kwargs)
        compare(got, expected, f"{self.name}({call})", rtol, atol)
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


@dataclass
class Exercise:
    """One exercise of a lesson."""

    label: str  # "8.2"
    name: str  # of the reader's function
    hints: tuple[str, str, str]
    checker: Callable[[Answer, np.random.Generator], Right]
    hints_given: int = 0
    passed: Any = None  # the answer that did


class Lesson:
    """A lesson's exercises.

    Args:
        number: of the lesson.
        topic: the rest of its file's name: lessons/08_ranks_that_talk.py has "ranks_that_talk".
    """

    def __init__(self, number: int, topic: str) -> None:
        self.number, self.topic = number, topic
        self.exercises: dict[str, Exercise] = {}
        self._last: str | None = None

    def exercise(
        self, label: str, hints: tuple[str, str, str]
    ) -> Callable[[Callable[[Answer, np.random.Generator], Right]], Callable[..., Right]]:
        """Register the checker of the exercise whose name it has."""

        def register(checker: Callable[[Answer, np.random.Generator], Right]) -> Callable[..., Right]:
            name = checker.__name__
            self.exercises[name] = Exercise(label, name, hints, checker)
            return checker

        return register

    def check(self, answer: Any, seed: int | None = None) -> None:
        """Try an answer on fresh random inputs; `seed` repeats those of an earlier check.

        Raises:
            NotAnswered: it is still the stub.
            WrongAnswer: says where, what was expected, and what came.
        """
        exercise = self._of(answer)
        self._last = exercise.name
        own = sys.modules.get(f"solutions.{self.stem}")
        if own is not None and getattr(own, exercise.name, None) is answer:
            raise NotAnswered(
                f"{exercise.name} is the lesson's own solution now, since or_solution put it there: run the "
                "cell with your answer again, and then this one."
            )
        right = self.judge(exercise.name, answer, seed)
        print(right)
        exercise.passed = answer
        progress.note(self.topic, exercise.name, right.at_par)

    def judge(self, name: str, answer: Any, seed: int | None = None) -> Right:
        """What `check` says, without keeping it: for tests."""
        exercise = self.exercises[name]
        if is_unanswered(answer):
            raise NotAnswered(
                f"Exercise {exercise.label}, {name}, has no answer yet: write it in the cell above, in place "
                "of the three dots, run that and this again. hint() gives the first of three hints."
            )
        if seed is None:
            seed = random.SystemRandom().randrange(10**6)
        message, interrupted = "", None
        mine = Answer(name, answer)
        try:
            found = exercise.checker(mine, np.random.default_rng(seed))
            message = found.too_dear()
        except WrongAnswer as error:
            message = str(error) + _and_printed(mine.printed.text)
        except KeyboardInterrupt as error:
            interrupted = reader_line(error, answer, or_def=False)  # none while ranks run it
        if interrupted is not None:
            place = f", at {interrupted}" if interrupted else ""
            raise Interrupted(f"Exercise {exercise.label}: the check was interrupted{place}.") from None
        if message:  # outside of the handler, so that no other exception hangs on this one; a Limit that a
            # trace raised into an `except:` of the answer's may count as being handled ever after
            again = f"(These inputs again: check({name}, seed={seed}))"
            raise WrongAnswer(f"Exercise {exercise.label}, not yet. {message}\n{again}") from None
        return found

    def hint(self, name: str | Any = None) -> None:
        """Print the next of three hints for the exercise that was checked last, or for the one named."""
        if name is None:
            open_ones = [each.name for each in self.exercises.values() if each.passed is None]
            name = self._last or (open_ones or list(self.exercises))[0]
        exercise = self._of(name) if not isinstance(name, str) else self._named(name)
        stage = min(exercise.hints_given, 2)
        exercise.hints_given += 1
        print(f"Exercise {exercise.label}, {exercise.name}, hint {stage + 1} of 3:\n{exercise.hints[stage]}")
        if stage == 2:
            print(f"The whole answer is in lessons/solutions/{self.stem}.py.")

    def or_solution(self, answer: Any) -> Any:
        """The answer where it has passed its check, else the solution, with a line that says so."""
        exercise = self._of(answer)
        if exercise.passed is answer:
            return answer
        print(f"{exercise.name}: yours has not passed yet, so the lesson goes on with its own solution.")
        return self.solution(exercise.name)

    def solution(self, name: str) -> Any:
        """The lesson's own answer."""
        return getattr(importlib.import_module(f"solutions.{self.stem}"), name)

    @property
    def stem(self) -> str:
        """08_ranks_that_talk."""
        return f"{self.number:02d}_{self.topic}"

    def _of(self, answer: Any) -> Exercise:
        names = [getattr(answer, "__name__", ""), *(each.__name__ for each in functions_of(answer))]
        for name in names:
            if name in self.exercises:
                return self.exercises[name]
        return self._named(names[0] or type(answer).__name__)

    def _named(self, name: str) -> Exercise:
        if name == "<lambda>":
            raise WrongAnswer("A lambda has no name to know it by: write the function with def.")
        if name not in self.exercises:
            raise WrongAnswer(
                f"This lesson has no exercise {name}; it has {', '.join(self.exercises)}. "
                "Give check the function itself, under the name that it had."
            )
        return self.exercises[name]


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


def _and_printed(text: str, most: int = 5) -> str:
    """What the failing call printed, as lines of a message."""
    lines = text.rstrip().splitlines()
    if not lines:
        return ""
    shown = [line[:100] for line in lines[:most]] + ["..."] * (len(lines) > most)
    return "\n".join(["\nThat call printed:", *(f"  {line}" for line in shown)])


def line_of_cell(filename: str, line: int) -> str:
    """A line as the reader knows it."""
    text = linecache.getline(filename, line).strip()
    return f"line {line} of your cell" + (f": {text}" if text else "")


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """A Limit in what takes more: in the main thread, where signals arrive; a compiled loop is not cut."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline, most = time.monotonic() + seconds, _peak() + MOST

    def look(number: int, frame: FrameType | None) -> None:
        late = time.monotonic() >= deadline
        rest = LOOK if late else min(LOOK, max(0.001, deadline - time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, rest)
        if frame is None or frame.f_code.co_filename in (__file__, contextlib.__file__):
            return  # on its way in or out: what is raised here would keep the timer from being taken away
        if late or _peak() > most:
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


def _peak() -> float:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
