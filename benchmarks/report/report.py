"""Sort results into sections, and show them as tables in a terminal or as JSON.

`sections` sorts one machine's newest results by group. The terminal (here), the page (`page.py`) and the
plots (`plots.py`) all show these sections.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minidist.benchmarks.harness import columns, machine, results
from minidist.benchmarks.harness.columns import Column, Entry
from minidist.benchmarks.harness.results import Results


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
        """Return the columns with any figures; if all rows have the same peer, headings name it."""
        shown = columns.shown(self.entries)
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
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in results.newest(found):
        groups.setdefault((entry["suite"], entry["group"]), []).append(entry)
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
        blas = f", {blas_kernel(run)}" if beside and run["software"].get("blas") else ""
        described.append(f"{run['mode']} run of {name.partition('T')[0]}{commit}{blas}")
    return "; ".join(dict.fromkeys(described))


def blas_kernel(run: dict[str, Any]) -> str:
    """Name the kernel of NumPy's BLAS in a run: `NumPy on openblas's SkylakeX kernel`."""
    blas = run["software"]["blas"]
    chosen = f", which {blas['chosen_by']} chose" if "chosen_by" in blas else ""
    return f"NumPy on {blas['name']}'s {blas['architecture']} kernel{chosen}"


def show(console: Console, found: Results) -> None:
    """Print one machine's results as tables, each with as many first columns as fit into the terminal."""
    console.print(Text(machine.title(found["machine_info"]), style="bold"))
    for section in sections(found):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold cyan")
        table.title = section.title
        table.caption = Text(provenance(found, section.entries))
        table.caption_justify = "left"
        labels = [columns.label(entry) for entry in section.entries]
        own = min(max(map(len, labels)), console.width // 2)
        table.add_column("", max_width=own, overflow="fold")
        room = console.width - own - 2  # the blanks at both ends
        shown = []
        for column in section.columns():
            cells = [column.cell(entry) or "" for entry in section.entries]
            width = max(map(len, cells))
            # Wrap a heading, between any words if need be, so that it is no wider than its cells.
            heading = textwrap.wrap(column.heading, max(width, *map(len, column.heading.split())))
            room -= max(width, *map(len, heading)) + 3  # and the blanks between columns
            if room < 0:
                break
            shown.append(column)
            table.add_column(
                Text("\n".join(heading)), justify="right" if column.right else "left", no_wrap=True
            )
        for entry, label in zip(section.entries, labels, strict=True):
            table.add_row(Text(label), *(_styled(entry, column) for column in shown))
        console.print(table)
    met, of = goals(found)
    if of:
        console.print(Text(f"{met} of {of} goals met", style="green" if met == of else "yellow"))


def _styled(entry: Entry, column: Column) -> Text:
    text = column.cell(entry) or ""
    if column is columns.GOAL and text:
        judged = columns.goal(entry)
        return Text(text, style="green" if judged and judged[2] else "yellow")
    return Text(text)


def _judged(entry: Entry) -> dict[str, Any]:
    """Return the verdict on a row's comparison, and whether it is undecided."""
    verdict = columns.verdict(entry)
    return {} if verdict is None else {"verdict": verdict, "undecided": columns.undecided(entry)}


def as_json(found: Results) -> dict[str, Any]:
    """Return one machine's report for a program to read: times in seconds, sizes in bytes."""
    met, of = goals(found)
    return {
        "machine": found["machine_info"],
        "runs": found["runs"],
        "goals": {"met": met, "of": of},
        "sections": [
            {
                "title": section.title,
                "about": section.about,
                "rows": [
                    {
                        "label": columns.label(entry),
                        "mode": entry["mode"],
                        "run": entry["run"],
                        **entry["stats"],
                        **{key: value for key, value in entry["extra_info"].items() if key != "label"},
                        **_judged(entry),
                    }
                    for entry in section.entries
                ],
            }
            for section in sections(found)
        ],
    }
