"""The set-up of all benchmarks: `--full`, and the marker that keeps one out of a quick run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minidist.benchmarks.harness.strategy_table.strategy_rounds import Worlds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full: every benchmark, all sizes and more rounds; without it a run takes a few minutes."""
    parser.addoption(
        "--full", action="store_true", help="run every benchmark at all sizes, not only the quick ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `full_only`."""
    config.addinivalue_line("markers", "full_only: runs with --full only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what a quick run leaves out."""
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full_only")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether all sizes and rounds are wanted."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n)`: n warm ranks that share the machine's cores, the same for all suites."""
    from minidist.benchmarks.harness.strategy_table.strategy_rounds import warm_worlds

    with warm_worlds() as get:
        yield get
