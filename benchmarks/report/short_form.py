"""The short report, for a terminal, a README or a program: only what was found, and what to use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minidist.benchmarks.harness import columns, formats, machine, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import answer, report, side_by_side, verdicts
from minidist.benchmarks.report.answer import Choice, Question
from minidist.benchmarks.report.findings import findings

HEADINGS = ("strategy", "least memory per GPU", "fits", "largest batch", "sent per step")
COMPARED = ("time", "spread", "sent per step", "peer", "peer's time", "ratio of times")


def _cells(choice: Choice) -> list[str]:
    return [
        choice.name,
        formats.size(choice.memory.peak),
        "yes" if choice.fits else "no",
        f"{choice.recomputed:,} rows" if choice.fits else "–",
        formats.size(choice.sent),
    ]


def show(console: Console, machines: Mapping[str, Results]) -> None:
    """Print the findings and the answer."""
    found = findings(machines)
    if found:
        console.print(Text("What was found", style="bold"))
        for number, each in enumerate(found, 1):
            on = f" ({each.machine})" if each.machine else ""
            console.print(Padding(Text(f"{number}. {each.text}{on}"), (0, 0, 0, 1)))
        console.print()
    question = Question()
    choices = answer.choices(question)
    console.print(Text(f"What should I use? {question.text[0].upper()}{question.text[1:]}", style="bold"))
    console.print(Padding(Text(answer.sentence(question, choices).replace("`", "")), (0, 0, 0, 1)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left")
    for choice in choices:
        table.add_row(*_cells(choice), style="bold" if choice is answer.best(choices) else None)
    console.print(table)


def as_json(machines: Mapping[str, Results]) -> dict[str, Any]:
    """Return the findings, with the results that they rest on, and the answer for a program to read."""
    return {
        "findings": [
            {
                "text": each.text,
                "machine": each.slug,
                "rests_on": [{"name": entry["fullname"], "run": entry["run"]} for entry in each.rests_on],
            }
            for each in findings(machines)
        ],
        "cpu_ladder": side_by_side.as_json(machines),
        "answer": answer.as_json(Question()),
    }


def markdown(machines: Mapping[str, Results]) -> str:
    """Return the findings, the answer and each machine's table of strategies as Markdown."""
    question = Question()
    choices = answer.choices(question)
    lines = ["## What was found", ""]
    lines += [
        f"{number}. {each.text}{f' ({each.machine})' if each.machine else ''}"
        for number, each in enumerate(findings(machines), 1)
    ]
    lines += ["", "## What should I use?", "", f"{question.text[0].upper()}{question.text[1:]}: "]
    lines[-1] += answer.sentence(question, choices)
    lines += ["", *_table(HEADINGS, [_cells(choice) for choice in choices])]
    if shares := side_by_side.rows(machines):
        told = [[f"{row.machine}: {row.rung}", *row.cells(), row.measured] for row in shares]
        lines += ["", f"## {side_by_side.TITLE}", "", side_by_side.ABOUT, ""]
        lines += _table(("", *side_by_side.PRODUCTS, "measured"), told)
    for found in machines.values():
        compared = verdicts.strategies(results.newest(found))
        if compared:
            lines += ["", f"## {machine.title(found['machine_info'])}", ""]
            lines += _table(
                ("", *COMPARED),
                [_row(entry) for entry in compared],
            )
            lines += ["", f"Medians, measured in turns: {report.provenance(found, compared)}."]
    return "\n".join(lines) + "\n"


def _row(entry: Entry) -> list[str]:
    extra, cells = entry["extra_info"], {column.heading: column.cell(entry) for column in columns.COLUMNS}
    name = verdicts.name(entry)
    ranks = f", {extra['ranks']} ranks" if "ranks" in extra and "rank" not in name else ""
    return [name + ranks, *(cells[heading] or "" for heading in COMPARED)]


def _table(headings: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str] | tuple[str, ...]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(headings), f"|---|{'---:|' * (len(headings) - 1)}", *map(line, rows)]
