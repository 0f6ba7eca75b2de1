"""The set-up of all benchmarks, for `minidist bench` and for `pytest benchmarks --benchmark-only`.

Plain pytest gets here what `minidist bench` has: the timings are switched on, which the project's settings
switch off for tests; names that match those in a results file, for `--benchmark-compare`; and after
pytest-benchmark's table, which has no room for it, a table with the ratio to each benchmark's peer. Another
project gets all of it, and warm ranks, with `pytest -p minidist.benchmarks.conftest`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pytest_benchmark.logger import PytestBenchmarkWarning

if TYPE_CHECKING:
    from minidist.benchmarks.harness.training.rounds import Worlds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --full, for all sizes and more rounds; without it a run takes a few minutes."""
    parser.addoption(
        "--full", action="store_true", help="run every benchmark at all sizes, not only the quick ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and switch the timings on unless the command line itself switches them off."""
    config.addinivalue_line("markers", "full_only: runs with --full only")
    config.addinivalue_line("markers", "no_finding: no finding of the report rests on it")
    # A note of pytest-benchmark's, such as that the earlier run is another machine's, is no error: neither
    # while it loads that run, right after this, nor later.
    warnings.simplefilter("default", PytestBenchmarkWarning)
    config.addinivalue_line("filterwarnings", "default::pytest_benchmark.logger.PytestBenchmarkWarning")
    if "--benchmark-disable" not in config.invocation_params.args:
        from minidist.cli.bench import unset_coretype

        config.option.benchmark_disable = False
        unset_coretype()


def _named(config: pytest.Config) -> bool:
    """Whether the command line names benchmarks, by -k or by their file: those without a finding run too."""
    files = [arg for arg in config.args if Path(arg.partition("::")[0]).suffix == ".py"]
    return bool(config.option.keyword or files)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the headline first, and deselect what a quick run leaves out."""
    items.sort(key=lambda item: item.path.stem != "bench_headline")
    if config.getoption("--full"):
        return
    names = ["full_only", *([] if _named(config) else ["no_finding"])]
    left_out = [item for item in items if any(map(item.get_closest_marker, names))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """Describe the machine as results files do: pytest-benchmark's own description would name the host."""
    from minidist.benchmarks.harness import describe_machine as machine

    return machine.describe()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a line for each benchmark that ran in turns with a peer."""
    from minidist.benchmarks.harness import columns

    session: Any = getattr(config, "_benchmarksession", None)
    entries = [
        {"name": each.name, "stats": each.stats.as_dict(), "extra_info": each.extra_info}
        for each in (session.benchmarks if session else ())
        if "ratio" in each.extra_info
    ]
    if entries:
        terminalreporter.section("our time over the peer's: the median of pairs, and their middle half")
        for line in columns.beside_peers(entries):
            terminalreporter.write_line(line)


@pytest.fixture
def benchmark(benchmark: Any) -> Any:
    """pytest-benchmark's fixture; a result is named as in a results file, wherever pytest was started."""
    file, _, test = benchmark.fullname.partition("::")
    benchmark.fullname = f"{Path(file).name}::{test}"
    return benchmark


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether all sizes and rounds are wanted."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def named(request: pytest.FixtureRequest) -> bool:
    """Whether benchmarks are wanted on which no finding rests."""
    return _named(request.config)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n)`: n warm ranks that share the machine's cores, the same for all suites."""
    from minidist.benchmarks.harness.training.rounds import warm_worlds

    with warm_worlds() as get:
        yield get


@pytest.fixture(scope="module")
def timed(request: pytest.FixtureRequest, full: bool, worlds: Worlds) -> Callable[..., Any]:
    """`timed(*key)`: what the suite's `measured(worlds, full, *key)` returns, once for each key.

    One that failed fails again at once: all benchmarks of a key wait for the same programs.
    """
    found: dict[tuple[Any, ...], Any] = {}

    def get(*key: Any) -> Any:
        if key not in found:
            try:
                found[key] = request.module.measured(worlds, full, *key)
            except Exception as error:
                found[key] = error
        if isinstance(found[key], Exception):
            raise found[key]
        return found[key]

    return get
