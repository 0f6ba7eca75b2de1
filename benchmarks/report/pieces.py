"""What a page consists of: parts with pieces, such as tables, figures and cards. A piece names its template.

To show something new, give a chapter or the page one more piece. `page.py` puts them into the templates;
`printed.py` prints the same tables in a terminal and as Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.figures import Plot

UNITS = {
    "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0,
    "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip
VALUE = re.compile(r"[±<]?\s?([-−+]?\d[\d,]*\.?\d*)\s?([a-zA-Zµ]*)")
Source = tuple[str, Entry]
"""Where a number comes from: the slug of a machine, and a result."""


def identifier(text: str) -> str:
    """Turn a text into an id, which can also be part of a link."""
    return re.sub(r"[^\w-]+", "-", text)


@dataclass(frozen=True)
class Piece:
    """A piece of a page. Its template, named after its class, takes it as `piece`."""

    @property
    def template(self) -> str:
        """The template's file: `words.html`."""
        return f"{type(self).__name__.lower()}.html"


@dataclass(frozen=True)
class Part(Piece):
    """A part of the page, which a link can lead to."""

    name: str
    title: str
    pieces: Sequence[Piece]
    level: int = 2  # of its heading
    about: str = ""
    strong: bool = False  # whether the contents show it as the head of what follows


@dataclass(frozen=True)
class Words(Piece):
    """A heading, or a paragraph, or both. Text in `backticks` is code."""

    text: str = ""
    title: str = ""
    name: str = ""  # the heading's id
    level: int = 4  # of the heading
    quiet: bool = True


@dataclass(frozen=True)
class Bullets(Piece):
    """A list."""

    items: Sequence[str]
    quiet: bool = True


@dataclass(frozen=True)
class Facts(Piece):
    """Names and what they are; those that are empty are left out."""

    facts: Mapping[str, str]
    large: bool = False


@dataclass(frozen=True)
class Number:
    """A number in a sentence: its text, and the result that it comes from."""

    text: str
    entry: Entry


Word = str | Number


@dataclass(frozen=True)
class Finding:
    """A sentence computed from results."""

    words: tuple[Word, ...]
    rests_on: tuple[Entry, ...]  # all results that decided it, including those it does not name
    chapter: str  # the chapter that holds these results
    slug: str = ""  # the slug of their machine
    machine: str = ""  # the machine's title, if the report shows several

    @property
    def text(self) -> str:
        """The sentence as plain text."""
        return "".join(word if isinstance(word, str) else word.text for word in self.words)


@dataclass(frozen=True)
class Findings(Piece):
    """Sentences whose numbers lead to their results."""

    findings: Sequence[Finding]


@dataclass(frozen=True)
class Box:
    """A coloured part of a bar, in shares of the track's width; its style is one of `page.css`'s classes."""

    left: float
    width: float
    color: str  # a variable of `page.css`: "series-0", "good"
    text: str = ""
    style: str = ""  # "range", "dot"


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: its name, what it comes to, and its boxes."""

    name: str
    text: str
    boxes: Sequence[Box]


@dataclass(frozen=True)
class Bars:
    """A bar chart in HTML, so that its words are as large as the page's own on any screen."""

    rows: Sequence[Bar]
    alt: str  # for readers who can't see it
    caption: str
    lines: Mapping[str, float] = field(default_factory=dict)  # what each line across all bars is, and where
    legend: Mapping[str, str] = field(default_factory=dict)  # colours, and what they mean
    style: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart with its name on the page and its heading."""

    name: str
    heading: str
    plot: Bars | Plot


@dataclass(frozen=True)
class Figures(Piece):
    """Figures next to each other, as far as there is room."""

    figures: Sequence[Figure]
    wide: bool = False  # whether a figure takes the whole width


def figures(several: Iterable[tuple[str, str, Bars | Plot | None]]) -> list[Piece]:
    """Return charts, each with its name and heading, next to each other; none if none was drawn."""
    made = [Figure(name, heading, plot) for name, heading, plot in several if plot]
    return [Figures(made)] if made else []


@dataclass(frozen=True)
class Folded(Piece):
    """Pieces that are folded away under a summary."""

    summary: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text, style, and the result whose note it shows."""

    text: str
    kind: str = ""  # CSS classes: right, good, bad, undecided, wide
    source: Source | None = None  # if it differs from its row's

    @property
    def value(self) -> float | None:
        """The number that the text begins with, in its base unit, or None; cells sort by it.

        >>> Cell("26.5 KB").value, Cell("1.02 (0.98–1.10)").value, Cell("+3.00 µs").value
        (26500.0, 1.02, 3e-06)
        """
        found = VALUE.match(self.text)
        if not found:
            return None
        number = float(found[1].replace(",", "").replace("−", "-"))
        return number * UNITS.get(found[2], 1.0)


@dataclass(frozen=True)
class Row:
    """One row of a table, and the result whose note is marked at its head."""

    head: str
    cells: Sequence[Cell]
    source: Source | None = None
    own: bool = True  # whether all of the row is that result: links lead here, and all numbers show the note


@dataclass(frozen=True)
class Heading:
    """A heading of a table: its text, its figures' key in the JSON, and their alignment."""

    text: str
    key: str = ""
    right: bool = True


@dataclass(frozen=True)
class Table(Piece):
    """A table that readers can sort."""

    headings: Sequence[Heading]
    rows: Sequence[Row]
    told: Sequence[str] = ()  # lines below it, such as when it was measured
    first: str = ""  # the heading of the rows' heads
    label: str = ""  # the id of the heading on the page that says what it shows
    fold: str = ""  # a summary, if the table is folded away
