"""The report for a program to read, as JSON, and for a README, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minidist.benchmarks.harness import columns, machine, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import answer, ladders, verdicts, what_to_use
from minidist.benchmarks.report.answer import Question
from minidist.benchmarks.report.findings import findings
from minidist.benchmarks.report.pieces import Cell, Heading, Row, Table
from minidist.benchmarks.report.sections import goals, provenance, sections

COMPARED = ("time", "spread", "sent per step", "peer", "peer's time", "ratio of times")


def as_json(machines: Mapping[str, Results]) -> dict[str, Any]:
    """Return the whole report: times in seconds, sizes in bytes, shares in percent."""
    return {
        "machines": {slug: machine_as_json(found) for slug, found in machines.items()},
        "cuda_ladder": cuda_ladder_as_json(ladders.first_cuda_ladder(machines)),
        "findings": [
            {
                "text": each.text,
                "machine": each.slug,
                "rests_on": [{"name": entry["fullname"], "run": entry["run"]} for entry in each.rests_on],
            }
            for each in findings(machines)
        ],
        "cpu_ladder": [
            {
                "machine": row.slug,
                "title": row.machine,
                "measured": row.measured,
                "rung": row.rung,
                "percent_of_numpy": {
                    product: entry["extra_info"].get("percent_of_peer")
                    for product, entry in row.entries.items()
                },
            }
            for row in ladders.cpu_rows(machines)
        ],
        "answer": answer.as_json(Question()),
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


def cuda_ladder_as_json(climbed: ladders.CudaLadder) -> dict[str, Any]:
    """Return the CUDA ladder; if not measured, machine is null and sizes are empty."""
    keys = ("percent_of_peer", "percent_of_gpu_peak", "gflops", "peer_gflops")
    rows = [
        {
            "rung": row.rung,
            "dtype": row.dtype,
            "sizes": {
                str(size): {key: entry["extra_info"].get(key) for key in keys}
                for size, entry in sorted(row.entries.items())
            },
        }
        for row in climbed.rows
    ]
    return {"machine": climbed.machine, "rows": rows}


def markdown(machines: Mapping[str, Results]) -> str:
    """Return the findings, the answer and each machine's table of strategies as Markdown."""
    question = Question()
    choices = answer.choices(question)
    said = f"{what_to_use.asked(question)}: {answer.sentence(question, choices)}"
    lines = ["## What was found", ""]
    lines += [
        f"{number}. {each.text}{f' ({each.machine})' if each.machine else ''}"
        for number, each in enumerate(findings(machines), 1)
    ]
    lines += ["", "## What should I use?", "", said, ""]
    lines += _lines(what_to_use.choices(question, choices))
    if shares := ladders.cpu_rows(machines):
        lines += [
            "",
            f"## {ladders.CPU_TITLE}",
            "",
            ladders.CPU_ABOUT,
            "",
            *_lines(ladders.cpu_table(shares)),
        ]
    for found in machines.values():
        compared = verdicts.strategies(results.newest(found))
        if compared:
            lines += [
                "",
                f"## {machine.title(found['machine_info'])}",
                "",
                *_lines(_compared(compared, found)),
            ]
    return "\n".join(lines) + "\n"


def _compared(entries: Sequence[Entry], found: Results) -> Table:
    """Return the table of strategies compared with other libraries."""
    by_heading = {column.heading: column for column in columns.COLUMNS}
    rows = []
    for entry in entries:
        extra, name = entry["extra_info"], verdicts.name(entry)
        ranks = f", {extra['ranks']} ranks" if "ranks" in extra and "rank" not in name else ""
        cells = [Cell(by_heading[heading].cell(entry) or "") for heading in COMPARED]
        rows.append(Row(name + ranks, cells))
    told = f"Medians, measured in turns: {provenance(found, entries)}."
    return Table([Heading(heading) for heading in COMPARED], rows, [told])


def _lines(table: Table) -> list[str]:
    """Return a table's lines in Markdown, and what is told below it."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    head = [table.first, *(heading.text for heading in table.headings)]
    rows = [line([row.head, *(cell.text for cell in row.cells)]) for row in table.rows]
    told = [text for each in table.told for text in ("", each)]
    return [line(head), f"|---|{'---:|' * len(table.headings)}", *rows, *told]
