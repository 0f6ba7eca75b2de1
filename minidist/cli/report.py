"""The command `minidist report`: benchmark results as tables, a page, Markdown or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minidist._files import check_file, write_whole
from minidist.cli.options import Debug, Json
from minidist.cli.output import console, print_json, require, short, show


def report(
    machine: Annotated[str | None, typer.Option(help="The machine to show first.")] = None,
    results: Annotated[Path | None, typer.Option(help="The folder of results.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; default: report.html.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write Markdown for a README instead, to stdout or --out.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show benchmark results: print tables and findings, and write a page with figures."""
    from minidist.benchmarks.harness import results as kept
    from minidist.benchmarks.report import printed

    if markdown and as_json:
        raise ValueError("--markdown and --json are two forms of the report: give one of them")
    if out is None and not markdown and not as_json:
        out = Path("report.html")
    if out is not None:
        check_file("--out", out)
    first, found = kept.in_order(results or kept.folder(), machine)
    if markdown:
        text = printed.markdown(found)
        if out is None:
            print(text, end="")
        else:
            write_whole(out, text)
            show(f"Markdown: {short(out)}")
        return
    if as_json:
        print_json(printed.as_json(found))
    else:
        if first is None:
            show("This machine has no results yet: run minidist bench. These are another's.", style="yellow")
        days = sorted(run[:10] for run in next(iter(found.values()))["runs"])  # named after their times
        if days:
            when = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
            show(f"Measured {when}, not now. To measure again: minidist bench")
        printed.show(console(), found)
        others = list(found)[1:]
        if others:
            show(f"Other machines, for --machine: {', '.join(others)}")
    if out is not None:
        require("report", "matplotlib", "jinja2")
        from minidist.benchmarks.report.page import page

        write_whole(out, page(found))
        if not as_json:
            show(f"Page with figures: {short(out)}")
