"""Warm ranks that all tests share: starting them costs a second or two once, a test then milliseconds."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from minidist.comm.launching.cluster import Cluster

# A shell that runs tests in the background has them ignore Ctrl-C, and what they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every rank that makes an optimizer would import it, for a second: so those who start ranks do it once.
os.environ.setdefault("MINIDIST_PRELOAD", "torch._dynamo")

# A collection looks at all that torch, Numba and thousands of tests consist of, for half a second each time.
# There is none while these are made, and later ones look at what tests make.
gc.disable()


@pytest.fixture(scope="session")
def cluster_of() -> Iterator[Callable[[int], Cluster]]:
    """`cluster_of(n)`: a warm cluster of n ranks with a time limit of 30 s."""
    clusters: dict[int, Cluster] = {}

    def get(ranks: int) -> Cluster:
        if ranks not in clusters:
            clusters[ranks] = Cluster(ranks, timeout=30.0)
        return clusters[ranks]

    yield get
    for cluster in clusters.values():
        cluster.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send test functions to ranks by value: no rank then has to import a test module, and pytest with it."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # compiling makes millions of objects that stay
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
