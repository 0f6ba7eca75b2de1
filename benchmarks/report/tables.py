"""Tables of results: a row for each result, and a column for each figure that any of them has."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.benchmarks.harness import columns
from minidist.benchmarks.harness.columns import Column, Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report.pieces import Cell, Heading, Row, Table
from minidist.benchmarks.report.sections import Section, provenance

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


def _waits(which: str) -> Column:
    def cell(entry: Entry) -> str | None:
        share = entry["extra_info"].get("bubble", {}).get(which)
        return None if share is None else f"{100 * share:.1f}%"

    return Column(f"waits, {which}", cell, f"extra_info.bubble.{which}")


STRATEGY = tuple(columns.extra(name, name, right=name == "ranks") for name in ("ranks", "layout", "model"))
PIPELINE = (_waits("simulated"), _waits("measured"))


def of_section(section: Section, slug: str, found: Results, label: str = "", waits: bool = True) -> Table:
    """Return the table of one group's results; `waits` includes the shares of time that pipelines wait."""
    more = [column for column in PIPELINE if waits and any(column.cell(entry) for entry in section.entries)]
    return _table(section.entries, [*more, *section.columns()], slug, found, label)


def of_strategies(entries: Sequence[Entry], slug: str, found: Results, label: str) -> Table:
    """Return the table of strategies."""
    return _table(entries, _ordered(entries, FIRST), slug, found, label, "strategy")


def of_rungs(entries: Sequence[Entry], slug: str, found: Results, label: str) -> Table:
    """Return the table of the training ladder."""
    return _table(entries, _ordered(entries, FIRST_OF_RUNGS), slug, found, label, "rung")


def _ordered(entries: Sequence[Entry], headings: Sequence[str]) -> list[Column]:
    """Return the columns that these entries fill, starting with these."""
    several = [*columns.shown(entries), *STRATEGY]
    order = {heading: index for index, heading in enumerate(headings)}
    several.sort(key=lambda column: order.get(column.heading, len(order)))
    return [column for column in several if any(column.cell(entry) for entry in entries)]


def _table(
    entries: Sequence[Entry],
    several: Sequence[Column],
    slug: str,
    found: Results,
    label: str,
    first: str = "",
) -> Table:
    """Return a table of results. With a heading of its own for the first column it is never folded."""
    rows = [
        Row(
            columns.label(entry),
            [Cell(column.cell(entry) or "", _kind(column, entry)) for column in several],
            (slug, entry),
        )
        for entry in entries
    ]
    headings = [Heading(column.heading, column.key, column.right) for column in several]
    fold = f"All {len(rows)} results" if len(rows) > MOST_ROWS and not first else ""
    return Table(headings, rows, (provenance(found, entries),), first, label, fold)


def _kind(column: Column, entry: Entry) -> str:
    if column.key == columns.GOAL.key:  # compare keys, since a column may be renamed
        judged = columns.goal(entry)
        return "" if judged is None else "good" if judged[2] else "bad"
    if column.key == columns.RATIO.key and columns.verdict(entry):
        return f"right {KINDS[columns.verdict(entry) or '']}"
    if column.heading == "note":
        return "wide"
    return "right" if column.right else ""
