"""The command `minidist bench`: measure this machine and keep the results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from minidist.cli.options import Debug, Json
from minidist.cli.output import console, print_json, require, say, short, show


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="cpu_matmul, cuda, collectives, training, zero, ...; default: all."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All sizes and more rounds.")] = False,
    keyword: Annotated[
        str, typer.Option("-k", metavar="EXPRESSION", help="Only benchmarks that match, as in pytest.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The results file.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="An earlier results file: print what got slower.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine and keep the results. With --compare, exit code 1 if something got slower."""
    require("bench", "pytest", "pytest_benchmark")
    from minidist.benchmarks.harness.run import run

    done = run(suites or (), full=full, keyword=keyword, out=out, compare=compare)
    compared = done.compared
    if as_json:
        found = None if compared is None else compared.as_json()
        print_json(dataclasses.asdict(done) | {"path": str(done.path), "compared": found})
    else:
        for line in done.skipped:
            show(f"skipped {line}", style="yellow")
        many = "benchmark" if done.measured == 1 else "benchmarks"
        kept = "so nothing is kept."
        if done.measured:
            where = "" if out is None else f" --results {short(out.parent)}"
            kept = f"kept in {short(done.path)}. To read them: minidist report{where}"
        show(f"{done.measured} {many} in {done.seconds:.0f} s, {kept}")
        if "bench_cuda" in done.suites:
            from minidist.benchmarks.report import ladder

            ladder.show(console(), ladder.pick({done.path.stem: done.results}))
        for line in [] if compared is None else compared.lines():
            show(line, style="yellow" if ": slower, " in line else "")
    if compared is not None and compare is not None and compared.slower:
        say(f"{len(compared.having('slower'))} slower than in {short(compare)}")
    if done.failed:
        say(f"{len(done.failed)} failed: {'; '.join(done.failed)}")
    if done.failed or (compared is not None and compared.slower):
        raise typer.Exit(1)
