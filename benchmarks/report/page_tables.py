"""The page's tables: a row for each result, and a column for each figure that any of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from minidist.benchmarks.harness import columns
from minidist.benchmarks.harness.columns import Column, Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import ladder, report, side_by_side
from minidist.benchmarks.report.ladder import Ladder
from minidist.benchmarks.report.page_html import Cell, Heading, Row, folded, table
from minidist.benchmarks.report.page_notes import Notes, key
from minidist.benchmarks.report.report import Section
from minidist.benchmarks.report.side_by_side import Shares

MOST_ROWS = 12  # a longer table is folded
KINDS = {"faster": "good", "slower": "bad", "undecided": "undecided"}
# The first columns of the table of strategies, since readers ask for these most.
FIRST = (
    "time",
    "sent per step",
    "memory of the fullest rank",
    "ratio of times",
    "peer",
    "peer's time",
    "peer's memory",
    "over one process",
)
# The first columns of the training ladder.
FIRST_OF_RUNGS = (
    "the one idea",
    "lines",
    "time",
    "over one process",
    "ratio of times",
    "peer",
    "sent per step",
    "parameters, gradients, state",
    "memory of the fullest rank",
    "peer's memory",
)


def _text(name: str) -> Column:
    def cell(entry: Entry) -> str | None:
        found = entry["extra_info"].get(name)
        return None if found is None else str(found)

    return Column(name, cell, right=name == "ranks")


def _waits(which: str) -> Column:
    def cell(entry: Entry) -> str | None:
        share = entry["extra_info"].get("bubble", {}).get(which)
        return None if share is None else f"{100 * share:.1f}%"

    return Column(f"waits, {which}", cell)


STRATEGY = (_text("ranks"), _text("layout"), _text("model"))
PIPELINE = (_waits("simulated"), _waits("measured"))


@dataclass(frozen=True)
class Shown:
    """A machine's slug and results, with the page's notes."""

    slug: str
    found: Results
    notes: Notes


def of_section(section: Section, shown: Shown, labelled_by: str) -> str:
    """Return the table of one group's results."""
    waits = [column for column in PIPELINE if any(column.cell(entry) for entry in section.entries)]
    return _results(section.entries, [*waits, *section.columns()], shown, labelled_by)


def of_strategies(entries: Sequence[Entry], shown: Shown, labelled_by: str) -> str:
    """Return the table of strategies."""
    return _ordered(entries, FIRST, shown, labelled_by, "strategy")


def of_rungs(entries: Sequence[Entry], shown: Shown, labelled_by: str) -> str:
    """Return the table of the training ladder."""
    return _ordered(entries, FIRST_OF_RUNGS, shown, labelled_by, "rung")


def _ordered(
    entries: Sequence[Entry], headings: Sequence[str], shown: Shown, labelled_by: str, first: str
) -> str:
    """Return an unfolded table whose columns start with these."""
    several = [*columns.shown(entries), *STRATEGY]
    order = {heading: index for index, heading in enumerate(headings)}
    several.sort(key=lambda column: order.get(column.heading, len(order)))
    filled = [column for column in several if any(column.cell(entry) for entry in entries)]
    return _results(entries, filled, shown, labelled_by, most=len(entries), first=first)


def _results(
    entries: Sequence[Entry],
    several: Sequence[Column],
    shown: Shown,
    labelled_by: str,
    most: int = MOST_ROWS,
    first: str = "",
) -> str:
    rows = [
        Row(
            columns.label(entry),
            [Cell(column.cell(entry) or "", _kind(column, entry)) for column in several],
            shown.notes.anchor(shown.slug, entry),
            shown.notes.name(shown.slug, entry),
            shown.notes.mark(shown.slug, entry),
        )
        for entry in entries
    ]
    headings = [Heading(column.heading, key(column) or _key(column), column.right) for column in several]
    made = table(labelled_by, headings, rows, first)
    if len(rows) > most:
        made = folded(f"All {len(rows)} results", made)
    return made + f'<p class="quiet">{escape(report.provenance(shown.found, entries))}</p>\n'


def _kind(column: Column, entry: Entry) -> str:
    if column.cell is columns.GOAL.cell:  # compare cells, since a column may be renamed
        judged = columns.goal(entry)
        return "" if judged is None else "good" if judged[2] else "bad"
    if column.cell is columns.RATIO.cell and columns.verdict(entry):
        return f"right {KINDS[columns.verdict(entry) or '']}"
    if column.heading == "note":
        return "wide"
    return "right" if column.right else ""


def _key(column: Column) -> str:
    """Return the key of a column that only the page has."""
    if column in PIPELINE:
        return f"extra_info.bubble.{column.heading.removeprefix('waits, ')}"
    return f"extra_info.{column.heading}" if column in STRATEGY else ""


def of_ladder(climbed: Ladder, name: str, shown: Shown | None) -> str:
    """Return the table of the CUDA ladder; `shown` is None if nothing was measured."""
    rows = []
    for row in climbed.rows:
        texts = ladder.cells(climbed, row)
        marks = [""] * len(texts)
        if shown and row.entries:
            by_size = {size: shown.notes.name(shown.slug, entry) for size, entry in row.entries.items()}
            last = by_size[max(by_size)]
            marks = ["", *(by_size.get(size, "") for size in climbed.sizes), last, last]
        kinds = ["", *["right"] * (len(texts) - 1)]
        cells = [Cell(*each) for each in zip(texts, kinds, marks, strict=True)]
        mark = shown.notes.mark(shown.slug, row.entries[max(row.entries)]) if shown and row.entries else ""
        rows.append(Row(row.rung, cells, mark=mark))
    headings = [Heading(text, right=index > 0) for index, text in enumerate(ladder.headings(climbed))]
    made = table(name, headings, rows)
    return made + (f'<p class="quiet">{escape(climbed.provenance)}</p>\n' if climbed.provenance else "")


def of_shares(found: Sequence[Shares], notes: Notes, labelled_by: str) -> str:
    """Return the table of the CPU ladder on all machines, each with its own rows, and who measured when."""
    headings = [Heading(product) for product in side_by_side.PRODUCTS]
    rows = []
    for each in found:
        cells = [
            Cell(text, "right", notes.name(each.slug, each.entries[product]) if text else "")
            for product, text in zip(side_by_side.PRODUCTS, each.cells(), strict=True)
        ]
        rows.append(Row(f"{each.machine}: {each.rung}", cells))
    told = "".join(
        f'<p class="quiet">{escape(line)}</p>\n'
        for line in dict.fromkeys(f"{each.machine}: {each.measured}." for each in found)
    )
    return table(labelled_by, headings, rows, "machine and rung") + told
