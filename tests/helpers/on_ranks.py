"""Tests whose bodies the ranks run: what fails on any of them fails the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.conftest import Clusters


def on_ranks(*ranks: int, **values: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on so many ranks, once for each number of them and each value of each other argument.

    The values are tried in one call of the ranks, since each call costs the CPU some milliseconds.
    """
    each: list[dict[str, Any]] = [{}]
    for name, some in values.items():
        each = [{**given, name: value} for given in each for value in some]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def on_this_rank() -> None:
            for given in each:
                try:
                    body(**given)
                except Exception as error:
                    raise AssertionError(f"with {given}: {error!r}") from error

        def test(cluster_of: Clusters, ranks: int) -> None:
            cluster_of(ranks).run(on_this_rank)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return pytest.mark.parametrize("ranks", ranks)(test)

    return decorate
