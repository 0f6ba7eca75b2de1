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

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checks.support import progress
from checks.support.answers import Answer, reader_line
from checks.support.unanswered import functions_of, is_unanswered
from checks.support.verdicts import Interrupted, NotAnswered, Right, WrongAnswer

LESSONS = Path(__file__).parents[2]
if str(LESSONS) not in sys.path:  # ranks find `checks` and `solutions` by it, wherever they run
    sys.path.append(str(LESSONS))


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

    def check(self, answer: Any, seed: int | None = None, points: float | None = None) -> float | None:
        """Try an answer on fresh random inputs; `seed` repeats those of an earlier check.

        With `points`, as in a teacher's copy, return how many it earns: all of them at par, two thirds above.

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
        progress.note(self.topic, exercise.name, right.at_par, right.points)
        return points if points is None or right.at_par else points * 2 / 3

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


def _and_printed(text: str, most: int = 5) -> str:
    """What the failing call printed, as lines of a message."""
    lines = text.rstrip().splitlines()
    if not lines:
        return ""
    shown = [line[:100] for line in lines[:most]] + ["..."] * (len(lines) > most)
    return "\n".join(["\nThat call printed:", *(f"  {line}" for line in shown)])
