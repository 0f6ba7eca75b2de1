"""Run the suites with pytest and pytest-benchmark, show how far they are, and keep what they measured.

minidist bench                     quick: a few minutes on two cores
minidist bench --full              all sizes, more rounds
minidist bench launch -k warm      one suite, and of it what pytest's -k selects
minidist bench cuda                the CUDA ladder, on a GPU
minidist bench --compare OLD.json  and what got slower since then
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_benchmark.plugin

from minidist._names import unknown
from minidist._stopping import Stopped, termination
from minidist.benchmarks.harness import compare_runs, machine, results
from minidist.benchmarks.harness.progress import Watcher

HERE = Path(__file__).parent.parent


@dataclass
class Outcome:
    """What a run left: the file, what it holds now, a line for each benchmark that failed or was skipped."""

    path: Path
    results: results.Results
    measured: int
    seconds: float
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    suites: list[str] = field(default_factory=list)  # of which something was measured
    compared: compare_runs.Comparison | None = None  # with an earlier file


def suites() -> dict[str, Path]:
    """The suites by name: `launch` is bench_launch.py."""
    return {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}


def run(
    names: Sequence[str] = (),
    *,
    full: bool = False,
    keyword: str = "",
    out: Path | None = None,
    show: bool = True,
    compare: Path | None = None,
) -> Outcome:
    """Run suites (all where `names` is empty), and merge the figures into this machine's results file.

    Args:
        names: of suites, as `suites()` has them.
        full: all sizes and more rounds.
        keyword: pytest's -k expression: which benchmarks of those suites.
        out: the results file; by default one named after the machine in `results.folder()`.
        show: a progress bar and a line for each benchmark on stderr.
        compare: an earlier results file to set this run beside; it may be the one that is written.

    Raises:
        ValueError: an unknown suite, a selection that is empty, or results that can't be read.
        KeyboardInterrupt: the user stopped the run; nothing is written.
        Stopped: SIGTERM did.
    """
    known = suites()
    for name in names:
        if name not in known:
            raise unknown("suite", name, known)
    info = machine.describe()
    path = out or results.own_file(results.folder(), info)
    results.check_writable(path)  # before the minutes are spent
    earlier = None if compare is None else results.load(compare)  # before it may be written over
    watcher = Watcher(show)
    started = time.monotonic()
    measured = _pytest([known[name] for name in names] or list(known.values()), full, keyword, watcher)
    if watcher.broken:
        raise ValueError(f"the benchmarks could not be collected: {watcher.broken[0]}")
    if not watcher.collected and watcher.left_out:
        raise ValueError("; ".join(watcher.left_out.values()))
    if not watcher.collected and not keyword and not full:
        raise ValueError(f"{', '.join(names)} takes long: run it with --full")
    if not watcher.collected:
        raise ValueError(f"no benchmark matches -k {keyword!r}: run without -k, or with a part of a name")
    # A benchmark that failed after it was timed did not do what it is known for.
    passed = [bench for bench in measured if bench["fullname"] not in watcher.failed]
    new = _results(passed, info, watcher, full)
    # Read only now: another run may have written meanwhile.
    old = results.load(path) if path.exists() else None
    everything = None if names or keyword else [*watcher.collected, *_left_out(old, watcher)]
    merged = results.merge(old, new, everything=everything)
    if passed:
        results.save(merged, path)
    failed = [f"{name.partition('::')[2]}: {reason}" for name, reason in watcher.failed.items()]
    skipped = [f"{suite}: {reason}" for suite, reason in watcher.left_out.items()] + watcher.skipped
    compared = None
    if earlier is not None and passed:
        names_measured = [entry["fullname"] for entry in new["benchmarks"]]
        compared = compare_runs.compare(earlier, merged, names_measured, everything is not None)
    return Outcome(
        path,
        merged,
        len(passed),
        time.monotonic() - started,
        failed,
        skipped,
        sorted(new["suites"]),
        compared,
    )


def _left_out(old: results.Results | None, watcher: Watcher) -> list[str]:
    """The benchmarks that are there of suites which can't run now, as where a GPU is away: they stay."""
    suites_left_out = {f"bench_{name}" for name in watcher.left_out}
    return [
        entry["fullname"] for entry in (old or {}).get("benchmarks", []) if entry["suite"] in suites_left_out
    ]


def _pytest(paths: Sequence[Path], full: bool, keyword: str, watcher: Watcher) -> list[dict[str, Any]]:
    """pytest-benchmark's own record of a run of these files."""
    with (
        tempfile.TemporaryDirectory(prefix="minidist-bench-") as scratch,
        _quiet_environment(),
        contextlib.redirect_stderr(io.StringIO()),  # pytest-benchmark's word on where it wrote
        contextlib.closing(watcher),
        termination(_interrupt) as terminated,  # which ends the ranks, and leaves no scratch behind
    ):
        report = Path(scratch) / "report.json"
        code = pytest.main(
            [
                # No configuration but this: a project's own pytest settings are not meant for benchmarks.
                *("-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider", "-p", "no:terminal"),
                *("-o", "python_files=bench_*.py", f"--benchmark-json={report}"),
                f"--benchmark-storage=file://{scratch}",
                *(["--full"] if full else []),
                *(["-k", keyword] if keyword else []),
                *map(str, paths),
            ],
            plugins=[pytest_benchmark.plugin, watcher],
        )
        if terminated():
            raise Stopped("stopped by SIGTERM; results are as they were")
        if code == pytest.ExitCode.INTERRUPTED and not watcher.broken:
            raise KeyboardInterrupt
        if code == pytest.ExitCode.USAGE_ERROR:
            raise ValueError(
                f"pytest does not take -k {keyword!r}: give a part of a name, or names joined by and, or, not"
            )
        if code == pytest.ExitCode.INTERNAL_ERROR:
            raise RuntimeError(f"pytest itself failed: {watcher.crash}")
        found: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"] if report.exists() else []
        return found


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """Without the user's pytest options, and without other plugins, which would trace, reorder or warn."""
    ours = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    theirs = (
        "PYTEST_ADDOPTS",
        "PYTEST_PLUGINS",
        "PYTEST_XDIST_WORKER",
    )  # in one of its workers nothing is timed
    before = {name: os.environ.pop(name, None) for name in (*ours, *theirs)}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _results(
    measured: list[dict[str, Any]], info: dict[str, Any], watcher: Watcher, full: bool
) -> results.Results:
    """This run alone, in the form that `results.py` describes."""
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    entries = []
    for bench in measured:
        suite, _, name = bench["fullname"].partition("::")
        entries.append(
            {
                "suite": suite.removesuffix(".py"),
                "group": bench["group"] or suite.removesuffix(".py"),
                "name": name,
                "fullname": bench["fullname"],
                "run": when,
                "stats": {key: bench["stats"][key] for key in results.STATS},
                "extra_info": bench["extra_info"],
            }
        )
    about = {
        name: text for name, text in watcher.about.items() if name in {entry["suite"] for entry in entries}
    }
    described = {"mode": "full" if full else "quick", "software": machine.software(), "commit": _commit()}
    if info["gpus"]:
        described["driver"] = info["gpus"][0]["driver"]
    return {
        "schema": results.SCHEMA,
        "machine_info": info,
        "runs": {when: described},
        "suites": about,
        "benchmarks": entries,
    }


def _commit() -> str | None:
    """The commit that was measured, with a `+` where files differ from it; None for an installed package."""
    root = results.checkout()
    if root is None:
        return None
    git = ["git", "-C", str(root)]
    commit = machine.output([*git, "rev-parse", "--short", "HEAD"])
    # The results themselves change with every run.
    changed = machine.output([*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"])
    return f"{commit.strip()}{'+' if changed else ''}" if commit else None
