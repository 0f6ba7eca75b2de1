"""The report in a terminal, as JSON for a program to read, and as Markdown for a README.

A terminal shows tables with as many columns as fit, and below them the card and the findings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import card, ladders, tables
from minidist.benchmarks.report import decided_comparisons as verdicts
from minidist.benchmarks.report.findings import findings
from minidist.benchmarks.report.ladders import CudaLadder
from minidist.benchmarks.report.pieces import Cell, Table
from minidist.benchmarks.report.tables import goals, sections


def show(console: Console, machines: Mapping[str, Results]) -> None:
    """Print the first machine's tables and the ladders, then its card and the findings."""
    (slug, found), *_ = machines.items()
    show_machine(console, slug, found)
    if climbed := ladders.first_cuda_ladder(machines):
        show_cuda_ladder(console, climbed)
    else:
        console.print(Text(ladders.CUDA_MISSING.replace("`", "")))
    _heading(console, machine.title(found["machine_info"]))
    for name, text in card.facts(found).items():
        if text:
            console.print(Padding(Text(f"{name}: {text}"), (0, 0, 0, 1)))
    made = findings(slug, found)
    if made:
        _heading(console, "\nWhat was found")
        for number, each in enumerate(made, 1):
            console.print(Padding(Text(f"{number}. {each.text}"), (0, 0, 0, 1)))


def show_machine(console: Console, slug: str, found: Results) -> None:
    """Print one machine's results as tables."""
    _heading(console, machine.title(found["machine_info"]))
    for section in sections(found):
        table = fitted(tables.of_section(section, slug, found, waits=False), console.width)
        table.title, table.title_justify, table.title_style = section.title, "left", "bold cyan"
        console.print(table)
    met, of = goals(found)
    if of:
        console.print(Text(f"{met} of {of} goals met", style="green" if met == of else "yellow"))


def show_cuda_ladder(console: Console, ladder: CudaLadder) -> None:
    """Print the table of the CUDA ladder."""
    console.print(Text(ladder.title, style="bold cyan"))
    console.print(fitted(ladder.table(), console.width))


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def fitted(table: Table, width: int) -> Grid:
    """Return a table with as many of its first columns as fit into so many characters."""
    made = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    made.caption, made.caption_justify = Text(table.told[-1]) if table.told else None, "left"
    own = min(max(len(table.first), *(len(row.head) for row in table.rows)), width // 2)
    made.add_column(table.first, max_width=own, overflow="fold")
    room = width - own - 2  # the blanks at both ends
    shown = 0
    for index, heading in enumerate(table.headings):
        # Wrap a heading, between any words if need be, so that it is no wider than its cells.
        least = max(
            len(text) for text in [*(row.cells[index].text for row in table.rows), *heading.text.split()]
        )
        room -= least + 3  # and the blanks between columns
        if room < 0:
            break
        words = Text("\n".join(textwrap.wrap(heading.text, least)))
        made.add_column(words, justify="right" if heading.right else "left", no_wrap=True)
        shown += 1
    for row in table.rows:
        made.add_row(Text(row.head), *map(_styled, row.cells[:shown]))
    return made


def _styled(cell: Cell) -> Text:
    kinds = cell.kind.split()
    return Text(cell.text, style="green" if "good" in kinds else "yellow" if "bad" in kinds else "")


def as_json(machines: Mapping[str, Results]) -> dict[str, Any]:
    """Return the whole report: times in seconds, sizes in bytes, shares in percent."""
    first = next(iter(machines.items()))
    return {
        "card": card.facts(first[1]),
        "machines": {slug: machine_as_json(found) for slug, found in machines.items()},
        "findings": [
            {
                "text": each.text,
                "machine": each.slug,
                "rests_on": [{"name": entry["fullname"], "run": entry["run"]} for entry in each.rests_on],
            }
            for each in findings(*first)
        ],
    }


def machine_as_json(found: Results) -> dict[str, Any]:
    """Return one machine's results by section."""
    met, of = goals(found)
    return {
        "machine": found["machine_info"],
        "runs": found["runs"],
        "goals": {"met": met, "of": of},
        "sections": [
            {"title": each.title, "about": each.about, "rows": [_row(entry) for entry in each.entries]}
            for each in sections(found)
        ],
    }


def _row(entry: Entry) -> dict[str, Any]:
    verdict = columns.verdict(entry)
    judged = {} if verdict is None else {"verdict": verdict, "undecided": columns.undecided(entry)}
    own = {"label": columns.label(entry), "mode": entry["mode"], "run": entry["run"]}
    more = {key: value for key, value in entry["extra_info"].items() if key != "label"}
    return {**own, **entry["stats"], **more, **judged}


def markdown(machines: Mapping[str, Results]) -> str:
    """Return the first machine's card and findings, and each machine's tables, as Markdown."""
    slug, first = next(iter(machines.items()))
    lines = [f"## {machine.title(first['machine_info'])}", ""]
    lines += [f"- {name}: {text}" for name, text in card.facts(first).items() if text]
    lines += ["", "## What was found", ""]
    lines += [f"{number}. {each.text}" for number, each in enumerate(findings(slug, first), 1)]
    for slug, found in machines.items():
        if compared := verdicts.strategies(results.newest(found)):
            table = tables.of_comparisons(compared, slug, found)
            lines += ["", f"## {machine.title(found['machine_info'])}", "", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Table) -> list[str]:
    """Return a table's lines in Markdown, and what is told below it."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    head = [table.first, *(heading.text for heading in table.headings)]
    rows = [line([row.head, *(cell.text for cell in row.cells)]) for row in table.rows]
    told = [text for each in table.told for text in ("", each)]
    return [line(head), f"|---|{'---:|' * len(table.headings)}", *rows, *told]
