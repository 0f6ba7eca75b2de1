"""The set-up of all benchmarks: `--full` and `--named`, and the markers that keep one out of a quick run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from minidist.benchmarks.harness.training.rounds import Worlds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full, for all sizes and more rounds, and --named; without them a run takes a few minutes."""
    parser.addoption(
        "--full", action="store_true", help="run every benchmark at all sizes, not only the quick ones"
    )
    parser.addoption("--named", action="store_true", help="also run benchmarks on which no finding rests")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line("markers", "full_only: runs with --full only")
    config.addinivalue_line("markers", "no_finding: no finding of the report rests on it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what a quick run leaves out."""
    if config.getoption("--full"):
        return
    names = ["full_only", *([] if config.getoption("--named") else ["no_finding"])]
    left_out = [item for item in items if any(map(item.get_closest_marker, names))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether all sizes and rounds are wanted."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def named(request: pytest.FixtureRequest) -> bool:
    """Whether benchmarks are wanted on which no finding rests."""
    return bool(request.config.getoption("--named"))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n)`: n warm ranks that share the machine's cores, the same for all suites."""
    from minidist.benchmarks.harness.training.rounds import warm_worlds

    with warm_worlds() as get:
        yield get
