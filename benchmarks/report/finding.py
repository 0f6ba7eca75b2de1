"""A finding: one sentence whose numbers each know the result that they come from."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.benchmarks.harness.columns import Entry


@dataclass(frozen=True)
class Number:
    """A number in a sentence, as it is written, and the result that it was taken from."""

    text: str
    entry: Entry


@dataclass(frozen=True)
class Finding:
    """A sentence computed from results."""

    words: tuple[str | Number, ...]
    rests_on: tuple[Entry, ...]  # all that decided it, those that it does not name too
    chapter: str  # where they stand in the report
    slug: str = ""  # of their machine
    machine: str = ""  # what it is called, where the report shows several

    @property
    def text(self) -> str:
        """The sentence alone."""
        return "".join(word if isinstance(word, str) else word.text for word in self.words)


def finding(chapter: str, *words: str | Number, rests_on: tuple[Entry, ...] = ()) -> Finding:
    """A finding that rests on the results of its numbers, and on more where it says so."""
    named = [word.entry for word in words if isinstance(word, Number)]
    others = [entry for entry in rests_on if not any(entry is each for each in named)]
    return Finding(words, (*named, *others), chapter)
