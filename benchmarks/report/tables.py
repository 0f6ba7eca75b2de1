"""One machine's newest results, sorted into sections by group, and the tables of these.

A table has a row for each result, and a column for each figure that any of them has. The terminal, the page
and the JSON show the same sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.harness.columns import Column, Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report.pieces import Cell, Heading, Row, Table

MOST_ROWS = 12  # a longer table is folded
KINDS = {"faster": "good", "slower": "bad", "undecided": "undecided"}
# The first columns of the table of strategies, and of the training ladder, since readers ask for these most.
FIRST = {
    "strategy": (
        *("time", "sent per step", "memory of the fullest rank", "ratio of times", "peer", "peer's time"),
        *("peer's memory", "over one process"),
    ),
    "rung": (
        *("the one idea", "lines", "time", "over one process", "ratio of times", "peer", "sent per step"),
        *("parameters, gradients, state", "memory of the fullest rank", "peer's memory"),
    ),
}


@dataclass(frozen=True)
class Section:
    """One table of the report: the benchmarks of one group."""

    title: str
    about: str  # its suite's description
    entries: tuple[Entry, ...]  # from results.newest

    @property
    def peer(self) -> str | None:
        """The peer of all comparisons here; None if there is no peer or more than one."""
        peers = {entry["extra_info"]["peer"] for entry in self.entries if "peer" in entry["extra_info"]}
        return peers.pop() if len(peers) == 1 else None

    def columns(self) -> list[Column]:
        """Return the columns with any figures; headings name a peer that all rows share, and waiting."""
        shown = columns.shown(self.entries)
        if all("bubble" in entry["extra_info"] for entry in self.entries):
            shown = [replace(c, heading=WAITING) if c == columns.TIME else c for c in shown]
        if self.peer is None:
            return shown
        renamed = {
            columns.PEER_TIME: self.peer,
            columns.SHARE: f"of {self.peer}",
            columns.RATIO: f"time over {self.peer}",
            columns.BEYOND: f"time minus {self.peer}'s",
        }
        return [replace(c, heading=renamed.get(c, c.heading)) for c in shown if c != columns.PEER]


def sections(found: Results) -> list[Section]:
    """Sort one machine's newest results by group, in the order of the suites."""
    groups = columns.grouped(results.newest(found), lambda entry: (entry["suite"], entry["group"]))
    return [
        Section(group, found["suites"].get(suite, ""), tuple(entries))
        for (suite, group), entries in groups.items()
    ]


def goals(found: Results) -> tuple[int, int]:
    """Return how many of the goals measured on this machine were met, and their number."""
    judged = [judgement for entry in results.newest(found) if (judgement := columns.goal(entry))]
    return sum(kept for _, _, kept in judged), len(judged)


def provenance(found: Results, entries: Sequence[Entry]) -> str:
    """Say when and how these figures were measured: `quick run of 2025-01-31, commit 1a2b3c4`."""
    described = []
    for name in sorted({entry["run"] for entry in entries}):
        run = found["runs"][name]
        commit = f", commit {run['commit']}" if run["commit"] else ""
        beside = any(e["run"] == name and e["extra_info"].get("peer") == "numpy.matmul" for e in entries)
        blas = f", {_blas_kernel(run)}" if beside and run["software"].get("blas") else ""
        described.append(f"{run['mode']} run of {name.partition('T')[0]}{commit}{blas}")
    return "; ".join(dict.fromkeys(described))


def _blas_kernel(run: dict[str, Any]) -> str:
    """Name the kernel of NumPy's BLAS in a run: `NumPy on openblas's SkylakeX kernel`."""
    blas = run["software"]["blas"]
    chosen = f", which {blas['chosen_by']} chose" if "chosen_by" in blas else ""
    return f"NumPy on {blas['name']}'s {blas['architecture']} kernel{chosen}"


def _waits(which: str) -> Column:
    def cell(entry: Entry) -> str | None:
        share = entry["extra_info"].get("bubble", {}).get(which)
        return None if share is None else f"{100 * share:.1f}%"

    return Column(f"waits, {which}", cell, f"extra_info.bubble.{which}")


COMPARED = ("time", "spread", "sent per step", "peer", "peer's time", "ratio of times")
WAITING = "waiting, summed over ranks"
STRATEGY = tuple(columns.extra(name, name, right=name == "ranks") for name in ("ranks", "layout", "model"))
PIPELINE = (_waits("simulated"), _waits("measured"))


def of_section(section: Section, slug: str, found: Results, label: str = "", waits: bool = True) -> Table:
    """Return the table of one group's results; `waits` includes the shares of time that pipelines wait."""
    more = [column for column in PIPELINE if waits and any(column.cell(entry) for entry in section.entries)]
    return _table(section.entries, [*more, *section.columns()], slug, found, label)


def of_training(entries: Sequence[Entry], slug: str, found: Results, label: str, first: str) -> Table:
    """Return the table of strategies, or of the training ladder; `first` is one of FIRST."""
    several = [*columns.shown(entries), *STRATEGY]
    order = {heading: index for index, heading in enumerate(FIRST[first])}
    several.sort(key=lambda column: order.get(column.heading, len(order)))
    several = [column for column in several if any(column.cell(entry) for entry in entries)]
    return _table(entries, several, slug, found, label, first)


def of_comparisons(entries: Sequence[Entry], slug: str, found: Results) -> Table:
    """Return a short table of training steps beside another library's, for Markdown."""
    several = [column for column in columns.COLUMNS if column.heading in COMPARED]
    return _table(entries, several, slug, found, "", "strategy")


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
    told = [words for key, words in columns.EXPLAINED.items() if any(key == each.key for each in several)]
    return Table(headings, rows, (*told, provenance(found, entries)), first, label, fold)


def _kind(column: Column, entry: Entry) -> str:
    if column.key == columns.GOAL.key:  # compare keys, since a column may be renamed
        judged = columns.goal(entry)
        return "" if judged is None else "good" if judged[2] else "bad"
    if column.key == columns.RATIO.key and columns.verdict(entry):
        return f"right {KINDS[columns.verdict(entry) or '']}"
    if column.heading == "note":
        return "wide"
    return "right" if column.right else ""
