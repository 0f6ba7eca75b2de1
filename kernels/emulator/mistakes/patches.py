r"""Planted mistakes: each is a small change of a file, with what has to be said of it.

    [average_gradients]                                a part: a function, or a file
    forgets to divide: On 2 ranks | expected           the mistake, and words that have to be said
    -parameter.grad /= md.size()                       lines of the source, and what replaces them
    averages the weights: layers.0.linear.weight
    ~parameter.grad) => parameter.detach(), "mean")    the same inside of a line

A line of a change that begins with a space stays, and says where the others are. A change has to fit in one
place and no other, and need not repeat comments; `~old ==> new` is for several places. Words go on in lines
that begin with `|`, and a `\n` there is a new line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path


@dataclass
class Mistake:
    """One of a file of mistakes."""

    part: str
    name: str
    says: list[str]
    changes: list[str] = field(default_factory=list)


def mistakes_in(path: Path) -> tuple[list[Mistake], list[str]]:
    """All of a file in order, and the lines above the first part."""
    found: list[Mistake] = []
    above: list[str] = []
    part = ""
    for line in path.read_text().splitlines():
        if named := re.fullmatch(r"\[([\w/]+)\]", line):
            part = named[1]
        elif not part:
            above.append(line)
        elif line[0] == "|":
            found[-1].says += _words(line[2:])
        elif line[0].isalnum():
            name, says = line.split(": ", 1)
            found.append(Mistake(part, name, _words(says)))
        elif line[0] != "#":
            found[-1].changes.append(line)
    return found, above


def _words(says: str) -> list[str]:
    return says.replace("\\n", "\n").split(" | ")


def changed(text: str, changes: list[str]) -> str:
    """The text after all changes.

    Raises:
        ValueError: a change fits nowhere, or in more than one place.
    """
    left = list(changes)
    while left:
        if replaced := re.fullmatch(r"~(.*?) *=(=?)>(?: (.*))?", left[0]):
            old, everywhere, new = replaced.groups("")
            if (count := text.count(old)) == 0 or (count > 1) != bool(everywhere):
                raise ValueError(f"has {old!r} {count} times, not {'more than ' * bool(everywhere)}1")
            text = text.replace(old, new)
            del left[0]
            continue
        before = [*takewhile(lambda line: line[0] in " -", left)]
        after = [*takewhile(lambda line: line[0] == "+", left[len(before) :])]
        del left[: len(before) + len(after)]
        lines = text.split("\n")
        known = [re.sub(r"(?<=\S)  # .*", "", line).strip() for line in lines]
        sought = [line[1:].strip() for line in before]
        places = [i for i in range(len(lines)) if known[i : i + len(sought)] == sought]
        if len(places) != 1 or not sought:
            raise ValueError(f"has {sought or left} {len(places)} times, not 1")
        first, end = places[0], places[0] + len(before)
        stay = [line for line, each in zip(lines[first:end], before, strict=True) if each[0] == " "]
        margin = " " * (_indentation(lines[first]) - _indentation(before[0][1:]))
        lines[first:end] = [*stay, *(margin + line[1:] for line in after)]
        text = "\n".join(lines)
    return text


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
