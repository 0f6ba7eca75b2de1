"""Tests whose bodies the ranks run: what fails on any of them fails the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import minidist as md


def on_ranks(*ranks: int, **values: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on so many ranks, once for each number of them and each value of each other argument."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(cluster_of: Callable[[int], md.Cluster], ranks: int, given: dict[str, Any]) -> None:
            cluster_of(ranks).run(partial(body, **given))

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        each: list[dict[str, Any]] = [{}]
        for name, some in values.items():
            each = [{**given, name: value} for given in each for value in some]
        test = pytest.mark.parametrize("given", each, ids=lambda given: ",".join(map(str, given.values())))(
            test
        )
        return pytest.mark.parametrize("ranks", ranks)(test)

    return decorate
