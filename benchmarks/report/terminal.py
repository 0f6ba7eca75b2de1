"""The report in a terminal: tables with as many columns as fit, then the findings and the answer."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from minidist.benchmarks.harness import machine
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import answer, ladders, tables, what_to_use
from minidist.benchmarks.report.answer import Question
from minidist.benchmarks.report.findings import findings
from minidist.benchmarks.report.ladders import CudaLadder
from minidist.benchmarks.report.pieces import Cell, Table
from minidist.benchmarks.report.sections import goals, sections


def show(console: Console, machines: Mapping[str, Results]) -> None:
    """Print the first machine's tables, the ladders, the findings and the answer."""
    (slug, found), *_ = machines.items()
    show_machine(console, slug, found)
    show_cuda_ladder(console, ladders.first_cuda_ladder(machines))
    _show_cpu_ladders(console, machines)
    made = findings(machines)
    if made:
        _heading(console, "What was found")
        for number, each in enumerate(made, 1):
            on = f" ({each.machine})" if each.machine else ""
            console.print(Padding(Text(f"{number}. {each.text}{on}"), (0, 0, 0, 1)))
        console.print()
    question = Question()
    choices = answer.choices(question)
    _heading(console, f"What should I use? {what_to_use.asked(question)}")
    console.print(Padding(Text(answer.sentence(question, choices).replace("`", "")), (0, 0, 0, 1)))
    console.print(fitted(what_to_use.choices(question, choices), console.width))


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
    if ladder.machine is None:
        console.print(Text(ladders.CUDA_HOW.replace("`", "")))


def _show_cpu_ladders(console: Console, machines: Mapping[str, Results]) -> None:
    """Print the CPU ladder on each machine, one under the other."""
    rows = ladders.cpu_rows(machines)
    if rows:
        console.print(Text(ladders.CPU_TITLE, style="bold cyan"))
        console.print(Text(ladders.CPU_ABOUT))
    for (title, measured), own in itertools.groupby(rows, key=lambda row: (row.machine, row.measured)):
        several = list(own)
        made = ladders.cpu_table(several)
        heads = [replace(row, head=of.rung) for row, of in zip(made.rows, several, strict=True)]
        _heading(console, f"\n{title}")
        console.print(fitted(replace(made, rows=heads, told=[measured], first=""), console.width))


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def fitted(table: Table, width: int) -> Grid:
    """Return a table with as many of its first columns as fit into so many characters."""
    made = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    made.caption, made.caption_justify = Text("\n".join(table.told)) if table.told else None, "left"
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
        style = "bold" if row.kind == "chosen" else ""
        made.add_row(Text(row.head), *map(_styled, row.cells[:shown]), style=style)
    return made


def _styled(cell: Cell) -> Text:
    kinds = cell.kind.split()
    return Text(cell.text, style="green" if "good" in kinds else "yellow" if "bad" in kinds else "")
