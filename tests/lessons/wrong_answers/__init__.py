"""Wrong answers that students really give, one module a lesson; `test_lessons.py` has the checks find them.

WRONG = WrongAnswers()

@WRONG.to("shift", "rank 0's result", "expected")     # words that the message has to contain
def gives_to_the_rank_before(x):
    ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Wrong:
    exercise: str
    says: tuple[str, ...]
    answer: Any


class WrongAnswers(list[Wrong]):
    """Wrong answers of one lesson, and right ones that cost more than par."""

    def __init__(self) -> None:
        super().__init__()
        self.dear: list[Wrong] = []

    def to(self, exercise: str, *says: str) -> Callable[[Any], Any]:
        """Register a wrong answer to an exercise, and what its check has to say."""

        def register(answer: Any) -> Any:
            self.append(Wrong(exercise, says, answer))
            return answer

        return register

    def over_par(self, exercise: str, *says: str) -> Callable[[Any], Any]:
        """Register a right answer that costs too much, and what its check has to say."""

        def register(answer: Any) -> Any:
            self.dear.append(Wrong(exercise, says, answer))
            return answer

        return register
