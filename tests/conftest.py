"""Warm ranks that all tests share: starting them costs a second or two once, a test then milliseconds."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import pytest
from hypothesis import HealthCheck, settings

from minidist.comm.launching.cluster import Cluster
from minidist.comm.launching.rank_processes import supervisor
from minidist.comm.launching.supervisor import PRELOAD
from minidist.parallel.training import bf16_on_cpu
from tests.helpers.clocks import HANG
from tests.helpers.made_once import made_once

ROOT = Path(__file__).parent.parent
Clusters = Callable[[int], Cluster]
"""The type of `cluster_of`."""
Run = Callable[..., tuple[object, str, str]]
"""The type of `run`."""

# A shell that runs tests in the background has them ignore Ctrl-C, and what they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of processes import the same files. Where the environment forbids Python to keep bytecode, each of
# them would compile minidist again, for half a second.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What every rank that trains would import, for a second and more: those who start ranks do it once.
os.environ.setdefault(PRELOAD, "torch._dynamo,minidist.parallel.engine.prepare,minidist.model.gpt")

# jsonschema, which nbformat imports, would build a grammar of addresses with it: a second for each process.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# Before any product: torch then no longer reads the variable. The first run on a machine pays for a trial.
bf16_on_cpu.avoid()
# Hypothesis would fail an example of more than 0.2 s, which is a matter of the machine and its load.
settings.register_profile(
    "any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
# Thousands of trainings here are compared with one process by the tests. Those of the rehearsal ask for it.
os.environ.setdefault("MINIDIST_REHEARSE", "0")

# A collection looks at all that torch, Numba and thousands of tests consist of, for half a second each time.
# There is none while these are made, and later ones look at what tests make.
gc.disable()


@pytest.fixture(scope="session")
def _clusters() -> Iterator[dict[int, Cluster]]:
    clusters: dict[int, Cluster] = {}
    yield clusters
    for cluster in clusters.values():
        cluster.close()


@pytest.fixture(scope="session")
def cluster_of(_clusters: dict[int, Cluster]) -> Clusters:
    """`cluster_of(n)`: a warm cluster of n ranks of one thread each, with a time limit that no test reaches.

    Threads that spin while they wait take the cores from other tests. With two threads in the only rank of a
    cluster, a training step of a small model took up to eight times as much time of the cores.
    """

    def get(ranks: int) -> Cluster:
        if ranks not in _clusters:
            _clusters[ranks] = Cluster(ranks, timeout=HANG, threads=1)
        return _clusters[ranks]

    return get


@pytest.fixture(autouse=True, scope="module")
def _few_idle_ranks(_clusters: dict[int, Cluster]) -> Iterator[None]:
    """End clusters of more than four ranks with the module that used them.

    gloo wakes an idle rank a hundred times a second for each of its groups. With 36 warm ranks that took 15 %
    of a core from all other tests.
    """
    yield
    for ranks in [ranks for ranks in _clusters if ranks > 4]:
        _clusters.pop(ranks).close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send test functions to ranks by value: no rank then has to import a test module, and pytest with it."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)
    cloudpickle.cloudpickle._find_imported_submodules = submodules


def submodules(code: CodeType, values: Iterable[object]) -> list[ModuleType]:
    """Modules that a function may reach through those it names, as torch.nn.functional through torch.

    cloudpickle compares all of 5,000 modules with each module that each function names: a tenth of the time
    of tests with ranks.
    """
    names = [value.__name__ for value in values if isinstance(value, ModuleType) and value.__package__]
    for name in names:  # which grow
        names += [inner for part in code.co_names if (inner := f"{name}.{part}") in sys.modules]
    return [module for name in names if (module := sys.modules.get(name)) is not None]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.set_threshold(10_000)  # compiling makes millions of objects that stay
    gc.enable()
    if not session.config.option.collectonly:
        start_supervisor([item for item in session.items if isinstance(item, pytest.Function)])


def start_supervisor(items: list[pytest.Function]) -> None:
    """Import what the ranks of these tests need once, and not in each of ten or more ranks.

    A test module lists in `PRELOAD` what its ranks import beyond what all do. Programs that tests start do
    not inherit these names: they would import them in vain.
    """
    names = {name for item in items for name in getattr(item.module, "PRELOAD", ())}
    if names or any("cluster_of" in item.fixturenames for item in items):
        names |= {"numba", "pytest"}  # many ranks run a rung, or patch something: 0.5 s and 0.25 s in each
        known = [name for name in sorted(names) if importlib.util.find_spec(name.partition(".")[0])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PRELOAD, ",".join([os.environ[PRELOAD], *known]))
            supervisor()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(*words)` runs `minidist WORDS` here; it returns the exit code, and what stdout and stderr got."""
    from minidist.cli import commands

    def run(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            commands.main(words)
        return ended.value.code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """An installed Chromium, without a window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site; the build fails at a warning."""
    pytest.importorskip("mkdocs", reason="the site needs pip install 'minidist[site]'")

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "site", build)
