r"""Wrong answers that students really give, each as a small change to the lesson's solution; a file a lesson.

    [average_gradients]                                       the exercise
    forgets to divide: On 2 ranks | expected | got            the mistake, and what the check has to say of it
    -parameter.grad /= md.size()                              lines of the solution, and what replaces them
    averages the weights: layers.0.linear.weight | got
    ~parameter.grad) => parameter.detach(), "mean")           the same inside of a line
    passes, but gathers and adds: above par in bytes sent     a right answer that costs more than par
    +gathered = comm.all_gather(parameter.grad)               no line to replace: this is the whole body

In a change, a line that begins with a space stays; it says where the others are. A change has to fit in one
place and no other, and need not repeat comments; `~old ==> new` is for several places. `=matmul_loops` takes
the body of another exercise. What a check says goes on in lines that begin with `|`, and `\n` in it is a new
line. Code above the first exercise belongs to all of them.
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

SOLUTIONS = Path(__file__).parents[3] / "lessons" / "solutions"
PASSES = "passes, but "


@dataclass
class Wrong:
    """One wrong answer, or a right one that costs more than par."""

    stem: str  # of the lesson
    exercise: str
    mistake: str
    says: list[str]  # words that the check's message has to contain
    changes: list[str]
    shared: list[str]  # code above the first exercise

    @property
    def passes(self) -> bool:
        """Above par."""
        return self.mistake.startswith(PASSES)

    @property
    def name(self) -> str:
        """For the name of a test."""
        return re.sub(r"\W+", "_", self.mistake)

    @functools.cached_property
    def text(self) -> str:
        """The lesson's solutions, one of them with this mistake."""
        lines = (SOLUTIONS / f"{self.stem}.py").read_text().splitlines()
        parts = {
            each.name: each
            for each in ast.parse("\n".join(lines)).body
            if isinstance(each, (ast.FunctionDef, ast.ClassDef))
        }

        def body_of(name: str) -> int:
            return parts[name].body[ast.get_docstring(parts[name]) is not None].lineno - 1

        own, top = parts[self.exercise], first_line(next(iter(parts.values())))
        begin, end, changes = first_line(own), own.end_lineno, self.changes
        if changes[0].startswith("="):
            other = changes[0][1:]
            body = lines[body_of(other) : parts[other].end_lineno]
            changes = [f"+{line[4:]}" for line in body] + changes[1:]
        try:
            mine = changed(lines[begin:end], changes, body_of(self.exercise) - begin)
        except ValueError as error:
            raise ValueError(f"{self.stem}, {self.exercise}, {self.mistake}: {error}") from None
        return "\n".join([*lines[:top], *self.shared, *lines[top:begin], *mine, *lines[end:], ""])

    @functools.cached_property
    def answer(self) -> Any:
        """The function or class, as if from a cell: no other process can import it."""
        file = str(Path(__file__).with_name(f"{self.stem}-{self.exercise}-{self.name}"))
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"__name__": f"cell {self.name}"}
        exec(compile(self.text, file, "exec"), names)
        return names[self.exercise]


def wrong_answers(stem: str) -> list[Wrong]:
    """All that are kept for a lesson, in order."""
    found: list[Wrong] = []
    shared: list[str] = []
    exercise = ""
    for line in Path(__file__).with_name(f"{stem[3:]}.txt").read_text().splitlines():
        if named := re.fullmatch(r"\[(\w+)\]", line):
            exercise = named[1]
        elif not exercise:
            shared.append(line)
        elif line[0] in "-+~= ":
            found[-1].changes.append(line)
        elif line[0] == "|":
            found[-1].says += words(line[2:])
        elif line[0] != "#":
            mistake, says = line.split(": ", 1)
            found.append(Wrong(stem, exercise, mistake, words(says), [], shared))
    return found


def words(says: str) -> list[str]:
    """What a check has to say, apart."""
    return says.replace("\\n", "\n").split(" | ")


def first_line(part: ast.FunctionDef | ast.ClassDef) -> int:
    """Of a function or class with its decorators, from 0."""
    return min(each.lineno for each in (part, *part.decorator_list)) - 1


def changed(lines: list[str], changes: list[str], body: int) -> list[str]:
    """The lines of an exercise's solution, whose body begins with line `body`, after all changes.

    Raises:
        ValueError: a change fits nowhere, or in more than one place.
    """
    left = list(changes)
    while left:
        if replaced := re.fullmatch(r"~(.*?) *=(=?)>(?: (.*))?", left[0]):
            old, everywhere, new = replaced.groups("")
            text = "\n".join(lines)
            if (count := text.count(old)) == 0 or (count > 1) != bool(everywhere):
                raise ValueError(f"{old!r} is there {count} times")
            lines = text.replace(old, new).split("\n")
            del left[0]
            continue
        before = [*takewhile(lambda line: line[0] in " -", left)]
        after = [*takewhile(lambda line: line[0] == "+", left[len(before) :])]
        if not before + after:
            raise ValueError(f"{left[0]!r} is no change")
        del left[: len(before) + len(after)]
        first, end, margin = body, len(lines), 4
        if before:
            known = [line.partition("  # ")[0].strip() for line in lines]
            sought = [line[1:].strip() for line in before]
            places = [i for i in range(len(lines)) if known[i : i + len(sought)] == sought]
            if len(places) != 1:
                raise ValueError(f"{sought} is there {len(places)} times")
            first, end = places[0], places[0] + len(before)
            margin = indentation(lines[first]) - indentation(before[0][1:])
        stay = [line for line, each in zip(lines[first:end], before) if each[0] == " "]  # noqa: B905
        lines = [*lines[:first], *stay, *(" " * margin + line[1:] for line in after), *lines[end:]]
    return lines


def indentation(line: str) -> int:
    """Spaces at its beginning."""
    return len(line) - len(line.lstrip())
