"""Wrong answers that students really give, each as a small change of the lesson's solution; a file a lesson.

`kernels/emulator/mistakes/patches.py` says how a change is written. Beside that, here,

    passes, but gathers and adds: above par in bytes sent      is a right answer that costs more than par;
    +gathered = comm.all_gather(parameter.grad)                with no line to replace this is the whole body;
    =matmul_loops                                              is the body of another exercise.

Code above the first exercise belongs to all of them.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from minidist.cli.lessons_export import definitions
from minidist.kernels.emulator.mistakes.patches import Mistake, changed, mistakes_in
from tests.lessons import LESSONS


@dataclass
class Wrong:
    """One wrong answer, or a right one that costs more than par."""

    stem: str  # of the lesson
    mistake: Mistake
    shared: list[str]  # code above the first exercise

    @property
    def exercise(self) -> str:
        return self.mistake.part

    @property
    def says(self) -> list[str]:
        """Words that the check's message has to contain."""
        return self.mistake.says

    @property
    def passes(self) -> bool:
        """Above par."""
        return self.mistake.name.startswith("passes, but ")

    @property
    def name(self) -> str:
        """For the name of a test."""
        return re.sub(r"\W+", "_", self.mistake.name)

    @functools.cached_property
    def text(self) -> str:
        """The lesson's solutions, one of them with this mistake."""
        whole = (LESSONS / "solutions" / f"{self.stem}.py").read_text()
        parts = definitions(whole)
        own, changes = parts[self.exercise], self.mistake.changes
        if changes[0][0] in "+=":
            body = [f"    {line[1:]}" for line in takewhile(lambda line: line[0] == "+", changes)]
            own = "\n".join([*halves(own)[0], *(body or halves(parts[changes[0][1:]])[1])])
            changes = changes[len(body) or 1 :]
        try:
            mine = changed(own, changes)
        except ValueError as error:
            raise ValueError(f"{self.stem}, {self.exercise}, {self.mistake.name}: it {error}") from None
        first = next(iter(parts.values()))
        whole = whole.replace(first, "\n".join([*self.shared, first]))
        return whole.replace(parts[self.exercise], mine)

    @functools.cached_property
    def answer(self) -> Any:
        """The function or class, as if from a cell: no other process can import it."""
        file = str(Path(__file__).with_name(f"{self.stem}-{self.exercise}-{self.name}"))
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"__name__": f"cell {self.name}"}
        exec(compile(self.text, file, "exec"), names)
        return names[self.exercise]


def halves(part: str) -> tuple[list[str], list[str]]:
    """The lines of a function or class as far as its docstring, and the others."""
    [node] = ast.parse(part).body
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    body = node.body[ast.get_docstring(node) is not None].lineno - 1
    return part.split("\n")[:body], part.split("\n")[body:]


def wrong_answers(stem: str) -> list[Wrong]:
    """All that are kept for a lesson, in order."""
    found, shared = mistakes_in(Path(__file__).with_name(f"{stem[3:]}.txt"))
    return [Wrong(stem, mistake, shared) for mistake in found]
