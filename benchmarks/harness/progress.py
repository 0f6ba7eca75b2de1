"""A pytest plugin for `minidist bench`: a line for each finished benchmark, and a progress bar."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minidist.benchmarks.harness import columns, formats


class Watcher:
    """A pytest plugin that prints each finished benchmark, and records which failed or were skipped."""

    def __init__(self, show: bool) -> None:
        self.collected: list[str] = []
        self.about: dict[str, str] = {}
        self.failed: dict[str, str] = {}  # fullname -> what went wrong
        self.skipped: list[str] = []
        self.left_out: dict[str, str] = {}  # suite -> why it can't be measured here
        self.without_finding: list[str] = []  # benchmarks that this run leaves out, since they are not named
        self.broken: list[str] = []
        self.crash = ""
        self._group: str | None = None
        # pytest captures stderr while a benchmark runs, so keep a copy of the real one and note its width.
        target = os.dup(2) if show else os.devnull
        self.stream = open(target, "w", errors="replace")  # noqa: SIM115 (closed in close)
        width = Console(stderr=True).width if sys.stderr.isatty() else 100
        self._console = Console(file=self.stream, width=width)
        # Redrawing the bar ten times a second would disturb the timing; ours moves between benchmarks.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            disable=not self._console.is_terminal,
            expand=True,
            redirect_stdout=False,  # pytest's capture redirects and restores both
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    @contextlib.contextmanager
    def elsewhere(self, benchmarks: int) -> Iterator[None]:
        """Leave `stream` to other processes, which run so many of the benchmarks."""
        self._progress.stop()
        yield
        self._progress.advance(self._task, benchmarks)
        if benchmarks < len(self.collected):
            self._progress.start()

    def close(self) -> None:
        """Remove the progress bar."""
        self._progress.stop()
        self.stream.close()

    def pytest_benchmark_generate_commit_info(self) -> dict[str, Any]:
        """Return nothing: pytest-benchmark would ask whatever repository is in the working directory."""
        return {}

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record an error that ended pytest itself."""
        self.crash = excinfo.exconly()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record suites that can't be imported, and suites that can't be measured here."""
        if report.failed:
            self.broken.append(f"{report.nodeid}: {_reason(report)}")
        elif report.skipped:
            suite = Path(report.nodeid).stem.removeprefix("bench_")
            self.left_out[suite] = _why_skipped(report)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Record benchmarks on which no finding rests: their earlier results stay in the file."""
        self.without_finding += [item.nodeid for item in items if item.get_closest_marker("no_finding")]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the benchmarks and their suites' descriptions, and set the bar's length."""
        self.collected = [item.nodeid for item in session.items]
        for item in session.items:
            if isinstance(item, pytest.Function):
                document = (item.module.__doc__ or "").strip()
                self.about[item.path.stem] = " ".join(document.partition("\n\n")[0].split())
        self._progress.update(self._task, total=len(self.collected))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show which benchmark is running."""
        self._progress.update(
            self._task, description=nodeid.partition("::")[2].removeprefix("test_"), refresh=True
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record why the run ended early."""
        if session.shouldfail:
            self.skipped.append(f"all later benchmarks: {session.shouldfail}")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Print the benchmark's time and its comparison."""
        fixture = getattr(item, "funcargs", {}).get("benchmark")
        if fixture is None or fixture.stats is None or item.nodeid in self.failed:
            return
        entry = {"name": item.name, "stats": fixture.stats.stats.as_dict(), "extra_info": fixture.extra_info}
        group = fixture.group or item.path.stem
        if group != self._group:
            self._group = group
            self._console.print(f"\n{self._group}", style="bold cyan", highlight=False, markup=False)
        ratio = fixture.extra_info.get("ratio")
        compared = f"{formats.times(ratio)} x {fixture.extra_info['peer']}" if ratio else ""
        compared += " (undecided)" if columns.undecided(entry) else ""
        line = f"  {columns.label(entry):<28} {formats.seconds(entry['stats']['median']):>9}   {compared}"
        self._console.print(line.rstrip(), highlight=False, markup=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record failures and skips, each in one line."""
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.failed[report.nodeid] = _reason(report)
            self._console.print(
                f"  {name} failed: {_reason(report)}", style="red", highlight=False, markup=False
            )
        elif report.skipped:
            self.skipped.append(f"{name}: {_why_skipped(report)}")
        if report.when == "teardown":
            self._progress.advance(self._task)
            self._progress.refresh()


def _why_skipped(report: pytest.CollectReport | pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return str(reason).removeprefix("Skipped: ")


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the first line of a failure's message, such as `AssertionError: ...`."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        first, *more = [line.strip() for line in str(crash.message).splitlines() if line.strip()]
        # NumPy's messages begin with a line feed.
        return f"{first} {more[0]}" if first.endswith(":") and more else first
    # A suite that can't be imported has only text, whose last line marked with E names the error.
    marked = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return marked[-1] if marked else "unknown error"
