"""The command `minidist judge`: check your own kernels on random numbers, and score them by what they cost.

minidist judge my_kernels.py
minidist judge --show softmax
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from minidist._files import check_file, write_whole
from minidist._names import unknown
from minidist.cli.options import Debug, Json
from minidist.cli.output import print_json, show

COSTS = ["instructions", "registers", "sectors", "conflicts", "barriers", "matrix", "steps", "launches"]
COLUMNS = ["problem", "score", "name", "date", "cost", *COSTS]
# Of COSTS, in the printed table, where ten problems have 100 columns.
HEADS = ["instr.", "regs", "sectors", "confl.", "barr.", "matrix", "steps", "launch"]


def judge(
    file: Annotated[
        Path | None, typer.Argument(help="A Python file with functions named after problems.")
    ] = None,
    names: Annotated[
        list[str] | None, typer.Argument(help="Problems; default: all that it has functions for.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Only name the problems, each with its task.")
    ] = False,
    shown: Annotated[
        str | None, typer.Option("--show", metavar="NAME", help="One problem: its specification, and par.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="A leaderboard, a CSV file: keep each name's best.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Your name in it; default: the file's.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge CUDA kernels of your own in the emulator: right for random numbers, and a score of 100 for par.

    The score is made of what a solution costs, which is counted and the same on any machine: instructions,
    sectors, conflicts, barriers, registers. It needs no GPU.
    """
    from minidist.kernels.judge import PROBLEMS
    from minidist.kernels.judge import judge as verdicts_on

    for each in [shown] if shown is not None else names or ():
        if each not in PROBLEMS:
            raise unknown("problem", each, PROBLEMS)
    if listed or shown is not None:
        chosen = [PROBLEMS[shown]] if shown is not None else [*PROBLEMS.values()]
        if as_json:
            print_json({one.name: {"specification": one.specification, "par": one.par} for one in chosen})
        else:
            texts = [one.specification for one in chosen]
            show("\n".join(texts if shown else [text.partition("\n")[0] for text in texts]))
        return
    if file is None:
        raise ValueError("name a file to judge; minidist judge --list has the problems")
    rows = [] if table is None else _read(table, [*PROBLEMS])
    verdicts = verdicts_on(file, names or PROBLEMS)
    found = {}
    lines = [["problem", "score", "cost", "par", *HEADS, "GPU us"]]
    for one in verdicts:
        counted = one.costs and {"cost": one.costs.total, **dataclasses.asdict(one.costs)}
        found[one.problem] = {
            "score": one.score,
            "wrong": one.wrong,
            **(counted or {}),
            "seconds": one.seconds,
        }
        if counted:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            row = {"problem": one.problem, "score": one.score, "name": name or file.stem, "date": now}
            rows.append({key: str(value) for key, value in (row | counted).items()})
            counted = {"cost": 0, "par": PROBLEMS[one.problem].par} | counted
        took = [] if one.seconds is None else [f"{one.seconds * 1e6:,.1f}"]
        numbers = [f"{count:,}" for count in counted.values()] if counted else []
        lines.append([one.problem, str(one.score), *numbers, *took])
    if as_json:
        print_json(found)
    else:
        _show_table(lines, [one.wrong for one in verdicts])
    if table is not None:
        rows.sort(key=lambda row: ([*PROBLEMS].index(row["problem"]), -float(row["score"])))
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        best: dict[tuple[str, str], dict[str, str]] = {}  # the first of equals
        writer.writerows(row for row in rows if best.setdefault((row["problem"], row["name"]), row) is row)
        write_whole(table, text.getvalue())
    if any(one["wrong"] for one in found.values()):
        raise typer.Exit(1)


def _show_table(rows: list[list[str]], wrong: list[str]) -> None:
    """Print a header and rows in columns as wide as their content; what is wrong stands behind its row."""
    columns = max(map(len, rows[1:]))  # a GPU's time is the last, if there is one
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    for (name, *cells), told in zip(rows, ["", *wrong], strict=True):
        line = " ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        show(f"{line}  {told}".rstrip())


def _read(table: Path, problems: list[str]) -> list[dict[str, str]]:
    """Return the rows of a leaderboard; none where there is no file yet. Raises ValueError if it is none."""
    check_file("--table", table)
    if not table.exists():
        return []
    reader = csv.DictReader(io.StringIO(table.read_text(encoding="utf-8", errors="replace")))
    rows = [*reader]
    score = re.compile(r"\d+(\.\d)?")
    whole = (
        None not in row and row["problem"] in problems and score.fullmatch(str(row["score"])) for row in rows
    )
    if reader.fieldnames != COLUMNS or not all(whole):
        raise ValueError(
            f"--table {table} is no leaderboard of minidist judge, which begins with {','.join(COLUMNS)}: "
            "name another file"
        )
    return rows
