"""The command `minidist bench`: measure this machine and keep the results."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from minidist.cli.options import Debug, Json
from minidist.cli.output import console, print_json, require, say, short, show


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="headline, cpu_matmul, cuda, training, ...; default: all, or those with findings."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All sizes and more rounds.")] = False,
    keyword: Annotated[
        str, typer.Option("-k", metavar="EXPRESSION", help="Only benchmarks that match, as in pytest.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The results file.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="An earlier results file: print what got slower.")
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="The I-th of N parts of the CUDA ladder: ten minutes at most.")
    ] = "",
    one_process: Annotated[
        bool, typer.Option("--one-process", help="The CUDA ladder in this process, not one for each rung.")
    ] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile", help="Only compile the CUDA ladder, on all cores; uses no GPU.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine and keep the results. With --compare, exit code 1 if something got slower.

    With --json and --out, it prints a summary alone: the figures are in the file.
    """
    require("bench", "pytest", "pytest_benchmark")
    unset_coretype()
    if compile_only:
        _compile(suites, as_json)
        return
    from minidist.benchmarks.harness.run_suites import run

    summary = as_json and out is not None
    done = run(
        suites or (),
        full=full,
        keyword=keyword,
        out=out,
        show=one_process or not summary,
        compare=compare,
        part=_part(part, suites),
        one_process=one_process,
    )
    compared = done.compared
    if as_json:
        found = dataclasses.asdict(done) | {"path": str(done.path)}
        found["compared"] = None if compared is None else compared.as_json()
        if summary:
            del found["results"]
        print_json(found)
        sys.stdout.flush()
        if one_process:  # without the GPU's own shut-down, which waits for a kernel that never ends
            os._exit(1 if done.failed else 0)
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
            from minidist.benchmarks.report import ladders, printed

            climbed = ladders.cuda_ladder(done.path.stem, done.results)
            if climbed is not None:
                printed.show_cuda_ladder(console(), climbed)
        for line in [] if compared is None else compared.lines():
            show(line, style="yellow" if ": slower, " in line else "")
    if compared is not None and compare is not None and compared.slower:
        say(f"{len(compared.having('slower'))} slower than in {short(compare)}")
    if done.failed:
        say(f"{len(done.failed)} failed: {'; '.join(done.failed)}")
    if done.failed or (compared is not None and compared.slower):
        raise typer.Exit(1)


def unset_coretype() -> None:
    """Let OpenBLAS choose its own kernel: with another CPU's, NumPy would be too easy to beat."""
    names = [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if os.environ.get(name)]
    if names and "numpy" not in sys.modules:  # OpenBLAS reads them once, as NumPy loads it
        given = " and ".join(f"{name}={os.environ.pop(name)}" for name in names)
        say(f"{given} unset for the measurement: OpenBLAS chooses its kernel for this CPU itself")


def _part(words: str, suites: list[str] | None) -> tuple[int, int]:
    """Return (2, 3) for "2/3", the second of three parts; ValueError if there is no such part."""
    if not words:
        return 1, 1
    number, slash, parts = words.partition("/")
    whole = slash and number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)
    if not whole or suites != ["cuda"]:
        raise ValueError(f"--part is {words}; give a part of one suite, as in minidist bench cuda --part 1/2")
    return int(number), int(parts)


def _compile(suites: list[str] | None, as_json: bool) -> None:
    """Compile the CUDA ladder for this machine's GPU; exit code 1 if a kernel can't be compiled."""
    if suites != ["cuda"]:
        raise ValueError("--compile is for the CUDA ladder alone; give minidist bench cuda --compile")
    from minidist.benchmarks.harness.cuda import compile_ladder
    from minidist.kernels.cache_folder import cache_folder
    from minidist.kernels.cuda.runtime.device import require_compiler

    try:
        require_compiler()
    except ImportError as error:
        raise ValueError(str(error)) from None
    started, lines, failed = time.monotonic(), [], 0
    for good, line in compile_ladder.compile_all(compile_ladder.this_gpu()):
        lines.append(line)
        failed += not good
        if not as_json:
            show(line, style="" if good else "red")
    seconds = time.monotonic() - started
    if as_json:
        print_json({"lines": lines, "failed": failed, "seconds": seconds})
    else:
        show(f"compiled in {seconds:.0f} s; the machine code is kept in {cache_folder() / 'kernels'}")
    if failed:
        say(f"{failed} variants can't be compiled")
        raise typer.Exit(1)
