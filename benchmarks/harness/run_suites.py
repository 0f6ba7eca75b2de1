"""Run the suites with pytest and pytest-benchmark, show the progress, and keep the results.

minidist bench                     quick: a few minutes on two cores
minidist bench --full              all sizes, more rounds
minidist bench launch -k warm      the benchmarks of one suite that pytest's -k selects
minidist bench cuda                the CUDA ladder, on a GPU, each rung in a process of its own
minidist bench --compare OLD.json  also list what got slower since then

Where a machine is slow, a quick run measures fewer rounds, three at least; tables say how many.
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
from unittest import mock

import pytest
import pytest_benchmark.plugin

from minidist._names import unknown
from minidist._stopping import Stopped, termination
from minidist.benchmarks.harness import compare_runs, results
from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness.cuda import one_rung
from minidist.benchmarks.harness.cuda.one_rung import OneRungAtATime
from minidist.benchmarks.harness.progress import Watcher

HERE = Path(__file__).parent.parent


@dataclass
class Outcome:
    """A finished run: the results file, what it holds now, and a line per failed or skipped benchmark."""

    path: Path
    results: results.Results
    measured: int
    seconds: float
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    suites: list[str] = field(default_factory=list)  # those with a new result
    compared: compare_runs.Comparison | None = None  # with the earlier file


def suites() -> dict[str, Path]:
    """Return the suites by name, the headline first: `launch` is bench_launch.py."""
    paths = sorted(HERE.glob("bench_*.py"), key=lambda path: (path.stem != "bench_headline", path.stem))
    return {path.stem.removeprefix("bench_"): path for path in paths}


def run(
    names: Sequence[str] = (),
    *,
    full: bool = False,
    keyword: str = "",
    out: Path | None = None,
    show: bool = True,
    compare: Path | None = None,
    part: tuple[int, int] = (1, 1),
    one_process: bool = False,
) -> Outcome:
    """Run suites (all if `names` is empty), and merge the figures into this machine's results file.

    Args:
        names: names of suites, see `suites()`; without, a quick run leaves out those marked `no_finding`.
        full: all sizes and more rounds.
        keyword: pytest's -k expression, to select benchmarks of those suites.
        out: the results file; by default one named after the machine in `results.folder()`.
        show: show a progress bar and a line for each benchmark on stderr.
        compare: an earlier results file to compare this run with; it may be the one that is written.
        part: (i, n) measures the i-th of n parts of the CUDA ladder, in less than ten minutes.
        one_process: run the CUDA ladder in this process as well, not each rung in one of its own.

    Raises:
        ValueError: the suite is unknown, the selection is empty, or results can't be read.
        KeyboardInterrupt: the user stopped the run; nothing is written.
        Stopped: SIGTERM stopped the run; nothing is written.
    """
    known = suites()
    for name in names:
        if name not in known:
            raise unknown("suite", name, known)
    info = machine.describe()
    path = out or results.own_file(results.folder(), info)
    results.check_writable(path, info)  # fail now, not after minutes of measuring
    earlier = None if compare is None else results.load(compare)  # it may be overwritten below
    watcher = Watcher(show)
    ladder = OneRungAtATime(watcher, full, keyword, path, part)
    started, began = time.monotonic(), _now()
    options = [*(["--full"] if full else []), *([str(known[name]) for name in names] or [str(HERE)])]
    measured = _pytest(options, keyword, [watcher] if one_process else [watcher, ladder])
    if watcher.broken:
        raise ValueError(f"the benchmarks could not be collected: {watcher.broken[0]}")
    if not watcher.collected and watcher.left_out:
        raise ValueError("; ".join(watcher.left_out.values()))
    if not watcher.collected and not keyword and not full:
        raise ValueError(f"{', '.join(names)} takes long, so a quick run leaves it out: run it with --full")
    if not watcher.collected:
        raise ValueError(f"no benchmark matches -k {keyword!r}: run without -k, or with a part of a name")
    # A benchmark may be timed and then fail its check: such a time is worthless.
    passed = [bench for bench in measured if bench["fullname"] not in watcher.failed]
    new = _results(passed, info, watcher, full)
    # Read the file only now, since another run may have written it meanwhile.
    old = results.load(path) if path.exists() else None
    kept = [*watcher.collected, *watcher.without_finding, *left_out_before(old, {*watcher.left_out})]
    everything = None if names or keyword else kept
    merged = results.merge(old, new, everything=everything)
    if passed:
        results.save(merged, path)
    of_ladder = [e for e in merged["benchmarks"] if e["suite"] == one_rung.SUITE and e["run"] >= began]
    entries = new["benchmarks"] + (of_ladder if ladder.took_over else [])
    failed = [f"{name.partition('::')[2]}: {reason}" for name, reason in watcher.failed.items()]
    skipped = [f"{suite}: {reason}" for suite, reason in watcher.left_out.items()] + watcher.skipped
    compared = None
    if earlier is not None and entries:
        names_measured = [entry["fullname"] for entry in entries]
        compared = compare_runs.compare(earlier, merged, names_measured, everything is not None)
    seconds, measured_suites = time.monotonic() - started, sorted({entry["suite"] for entry in entries})
    return Outcome(path, merged, len(entries), seconds, failed, skipped, measured_suites, compared)


def left_out_before(old: results.Results | None, names: set[str]) -> list[str]:
    """Name the old results to keep of suites that this run leaves out, for example without a GPU."""
    left_out, before = {f"bench_{name}" for name in names}, (old or {}).get("benchmarks", [])
    return [entry["fullname"] for entry in before if entry["suite"] in left_out]


def _pytest(options: list[str], keyword: str, plugins: list[Any]) -> list[dict[str, Any]]:
    """Run pytest, and return pytest-benchmark's record of the run; the first plugin is the watcher."""
    watcher: Watcher = plugins[0]
    with (
        tempfile.TemporaryDirectory(prefix="minidist-bench-") as scratch,
        _quiet_environment(),
        contextlib.redirect_stderr(io.StringIO()),  # pytest-benchmark prints where it wrote
        contextlib.closing(watcher),
        termination(_interrupt) as terminated,  # SIGTERM ends the ranks and removes the scratch folder
    ):
        report = Path(scratch) / "report.json"
        code = pytest.main(
            [
                # Ignore a project's own pytest settings, which are not meant for benchmarks.
                *("-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider", "-p", "no:terminal"),
                *("-o", "python_files=bench_*.py", f"--benchmark-json={report}"),
                f"--benchmark-storage=file://{scratch}",
                *(["-k", keyword] if keyword else []),
                *options,
            ],
            plugins=[pytest_benchmark.plugin, *plugins],
        )
        if terminated():
            raise Stopped("stopped by SIGTERM; what has no figures in the results file yet is lost")
        if code == pytest.ExitCode.INTERRUPTED and not watcher.broken:
            raise KeyboardInterrupt
        if code == pytest.ExitCode.USAGE_ERROR:
            raise ValueError(
                f"pytest rejects -k {keyword!r}: give a part of a name, or names joined by and, or, not"
            )
        if code == pytest.ExitCode.INTERNAL_ERROR:
            raise RuntimeError(f"pytest itself failed: {watcher.crash}")
        found: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"] if report.exists() else []
        return found


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """Hide the user's pytest options and other plugins, which would trace, reorder or warn."""
    with mock.patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}):
        # pytest-benchmark times nothing inside an xdist worker.
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER"):
            os.environ.pop(name, None)
        yield


def _results(
    measured: list[dict[str, Any]], info: dict[str, Any], watcher: Watcher, full: bool
) -> results.Results:
    """Return the results of this run alone, in the format that `results.py` describes."""
    when = _now()
    entries = []
    for bench in measured:
        suite, _, name = bench["fullname"].partition("::")
        entries.append(
            {
                "suite": suite.removesuffix(".py"),
                "group": bench["group"] or suite.removesuffix(".py"),
                "name": name,
                "fullname": bench["fullname"],
                "param": bench["param"],
                "params": bench["params"],
                "run": when,
                "stats": {key: bench["stats"][key] for key in results.STATS},
                "extra_info": bench["extra_info"],
            }
        )
    named = {entry["suite"] for entry in entries}
    about = {name: text for name, text in watcher.about.items() if name in named}
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


def _now() -> str:
    """Return the time in UTC, to the second: the name of a run."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _commit() -> str | None:
    """Return the measured commit, with a `+` if files differ from it, or None for an installed package."""
    root = results.checkout()
    if root is None:
        return None
    git = ["git", "-C", str(root)]
    commit = machine.output([*git, "rev-parse", "--short", "HEAD"])
    # Ignore the results, which change with every run.
    changed = machine.output([*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"])
    return f"{commit.strip()}{'+' if changed else ''}" if commit else None
