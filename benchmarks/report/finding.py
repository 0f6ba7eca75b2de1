"""A finding: one sentence in which each number knows the result that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.benchmarks.harness.columns import Entry


@dataclass(frozen=True)
class Number:
    """A number in a sentence: its text, and the result that it comes from."""

    text: str
    entry: Entry


@dataclass(frozen=True)
class Finding:
    """A sentence computed from results."""

    words: tuple[str | Number, ...]
    rests_on: tuple[Entry, ...]  # all results that decided it, including those it does not name
    chapter: str  # the chapter that holds these results
    slug: str = ""  # the slug of their machine
    machine: str = ""  # the machine's title, if the report shows several

    @property
    def text(self) -> str:
        """The sentence as plain text."""
        return "".join(word if isinstance(word, str) else word.text for word in self.words)


def finding(chapter: str, *words: str | Number, rests_on: tuple[Entry, ...] = ()) -> Finding:
    """Make a finding that rests on the results of its numbers and on those in `rests_on`."""
    named = [word.entry for word in words if isinstance(word, Number)]
    others = [entry for entry in rests_on if not any(entry is each for each in named)]
    return Finding(words, (*named, *others), chapter)
