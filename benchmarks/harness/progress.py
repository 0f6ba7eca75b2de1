"""A pytest plugin for `minidist bench`: a line for each benchmark as it ends, and a bar for those to come."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minidist.benchmarks.harness import columns


class Watcher:
    """A pytest plugin that shows each benchmark as it ends, and notes which there were and which failed."""

    def __init__(self, show: bool) -> None:
        self.collected: list[str] = []
        self.about: dict[str, str] = {}
        self.failed: dict[str, str] = {}  # by fullname, what went wrong
        self.skipped: list[str] = []
        self.left_out: dict[str, str] = {}  # suites by name, and why
        self.broken: list[str] = []
        self.crash = ""
        self._group: str | None = None
        # pytest captures stderr while a benchmark runs: this is the terminal behind it, with its width now.
        self._stream = os.fdopen(os.dup(2), "w") if show else open(os.devnull, "w")  # noqa: SIM115 (closed in close)
        width = Console(stderr=True).width if sys.stderr.isatty() else 100
        self._console = Console(file=self._stream, width=width)
        # A bar that redrew itself ten times a second would be measured too: ours moves in between.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            disable=not self._console.is_terminal,
            expand=True,
            redirect_stdout=False,  # pytest's own capture does that, and gives them back
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()
        self._stream.close()

    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any]:
        """Nothing: pytest-benchmark's own names the host, and `machine.describe` stands in the results."""
        return {}

    def pytest_benchmark_generate_commit_info(self) -> dict[str, Any]:
        """Nothing: pytest-benchmark's own asks whichever repository the user stands in."""
        return {}

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note what ended pytest itself."""
        self.crash = excinfo.exconly()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what keeps a suite from being read, and a suite that says why it can't be measured here."""
        if report.failed:
            self.broken.append(f"{report.nodeid}: {_reason(report)}")
        elif report.skipped:
            suite = Path(report.nodeid).stem.removeprefix("bench_")
            self.left_out[suite] = _why_skipped(report)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Now it is known how many there are."""
        self.collected = [item.nodeid for item in session.items]
        for item in session.items:
            if isinstance(item, pytest.Function):
                document = (item.module.__doc__ or "").strip()
                self.about[item.path.stem] = " ".join(document.partition("\n\n")[0].split())
        self._progress.update(self._task, total=len(self.collected))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which benchmark runs now."""
        self._progress.update(
            self._task, description=nodeid.partition("::")[2].removeprefix("test_"), refresh=True
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Note why the run ended before its end."""
        if session.shouldfail:
            self.skipped.append(f"what comes after: {session.shouldfail}")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Show what it measured."""
        fixture = getattr(item, "funcargs", {}).get("benchmark")
        if fixture is None or fixture.stats is None or item.nodeid in self.failed:
            return
        entry = {"name": item.name, "stats": fixture.stats.stats.as_dict(), "extra_info": fixture.extra_info}
        group = fixture.group or item.path.stem
        if group != self._group:
            self._group = group
            self._console.print(f"\n{self._group}", style="bold cyan", highlight=False, markup=False)
        ratio = fixture.extra_info.get("ratio")
        beside = f"{columns.times(ratio)} x {fixture.extra_info['peer']}" if ratio else ""
        beside += " (undecided)" if columns.undecided(entry) else ""
        line = f"  {columns.label(entry):<28} {columns.seconds(entry['stats']['median']):>9}   {beside}"
        self._console.print(line.rstrip(), highlight=False, markup=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note failures and skips, each as one line."""
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
    """The first line of what a test or a suite failed with, such as `AssertionError: ...`."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        first, *more = [line.strip() for line in str(crash.message).splitlines() if line.strip()]
        # numpy's begin with a line feed
        return f"{first} {more[0]}" if first.endswith(":") and more else first
    # A suite that can't be imported has text alone: its last marked line names the error.
    marked = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return marked[-1] if marked else "unknown error"
