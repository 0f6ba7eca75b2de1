"""Mistakes that people make in parallel training: the loss hides many of them.

Each is a few changed lines of a rung of the ladder, or of `recipe.py`, which adds to `data_parallel` what a
training has besides. They lie in the `.diff` files beside this one, a file for each class, as records:

    mistake: its name        on: a right change below it, of variants.diff     model: tied, dropout, positions
    rung: what it changes    options: of the rung's `train`                    rows: of a batch
    case: where it was published
    symptom: what a user saw
    @@
     lines of the file, of which
    -these go
    +and these come

| File | Holds |
|---|---|
| recipe.py | epochs, accumulation, padding, dropout, bfloat16, clipping, checkpoints |
| ranks.py | ranks as threads of one process, which count their calls |
| lone_rank.py | one rank by itself, to look at placements |
| trainings.py | the trainings that detectors look at, on n ranks and on one |
| formulas.py | what the pages say that a rank sends and holds |
| examine.py | `examine`: asks detectors (parallel/debugging, and two of the ladder) about a mistake |

`minidist mistakes` shows which detector finds which mistake, and `minidist mistakes --show NAME` one of them.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLASSES = ["data", "sharded", "tensor", "sequence", "pipeline", "context", "experts", "averaging"]
CLASSES += ["loading", "precision", "checkpoint"]


@dataclass(frozen=True)
class Mistake:
    """Changed lines of a rung; without lines the rung as it is."""

    rung: str
    on: str = ""
    model: str = ""
    rows: int = 11  # neither 2 ranks nor 4 micro-batches divide them
    options: tuple[tuple[str, Any], ...] = ()
    name: str = ""
    kind: str = ""  # of CLASSES
    symptom: str = ""
    case: str = ""
    diff: str = ""

    def __str__(self) -> str:
        """The mistake in words, and its lines."""
        below = f", with {self.on}" if self.on else ""
        case = f"\ncase:     {self.case}" if self.case else ""
        return f"{self.name}\nrung:     {self.rung}{below}\nsymptom:  {self.symptom}{case}\n{self.diff}"

    def source(self) -> str:
        """Return the rung's text with the changed lines."""
        module = "mistakes.recipe" if self.rung == "recipe" else self.rung
        text = inspect.getsource(importlib.import_module(f"minidist.plain.{module}"))
        below = [each for each in read("variants") if (each.name, each.rung) == (self.on, self.rung)]
        return apply(self.diff, apply(below[0].diff, text) if below else text)


def apply(diff: str, text: str) -> str:
    """Change a text's lines.

    Raises:
        ValueError: lines before the change are not in the text, or more than once.
    """
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        if text.count(before) != 1:
            raise ValueError(f"lines are {text.count(before)} times in the text, not once:\n{before}")
        text = text.replace(before, after)
    return text


def read(kind: str) -> list[Mistake]:
    """Return the records of a file."""
    found = []
    for record in (Path(__file__).parent / f"{kind}.diff").read_text().split("\n\n"):
        head, _, diff = record.strip("\n").partition("@@\n")
        fields: dict[str, Any] = dict(line.split(": ", 1) for line in head.splitlines())
        fields["options"] = tuple(
            tuple(pair.split("=")) for pair in fields.pop("options", "").split(", ") if pair
        )
        fields["rows"] = int(fields.get("rows", Mistake.rows))
        found.append(Mistake(name=fields.pop("mistake"), kind=kind, diff=f"@@\n{diff}\n", **fields))
    return found


def collection() -> dict[str, Mistake]:
    """Return all mistakes by their names, class after class."""
    return {mistake.name: mistake for kind in CLASSES for mistake in read(kind)}
