"""A plugin of pytest that fails if tests were collected and never reported.

Where too many workers of pytest-xdist die, the rest of the tests do not run, and the last line counts only
those that did. After Ctrl-C, and with -x or --maxfail, the rest was not meant to run.
"""

from __future__ import annotations

import pytest

collected: set[str] = set()
reported: set[str] = set()
SHOWN = 10


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    collected.update(ids)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    reported.add(report.nodeid)  # xdist reports the test during which a worker died


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    if excinfo.type is KeyboardInterrupt:  # xdist raises one of its own after too many crashes
        collected.clear()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.maxfail:
        collected.clear()
    if collected - reported:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    """Say it below the last line."""
    if lost := sorted(collected - reported):
        more = [f"... and {len(lost) - SHOWN} more"] if len(lost) > SHOWN else []
        print(
            f"{len(lost)} of {len(collected)} tests were collected and never reported:",
            *lost[:SHOWN],
            *more,
            sep="\n",
        )
