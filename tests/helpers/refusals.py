"""Tests of what a function refuses: a row for each mistake, with the error and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from minidist.comm.launching.cluster import Cluster


def refuses(
    call: Callable[..., object],
    *rows: tuple[Any, ...],
    error: type[Exception] = ValueError,
    literal: bool = False,
) -> Callable[..., None]:
    """A test, each of whose cases is (what is given, error, pattern of its text, or several patterns).

    Given are keywords in a dict, or one argument. error: of rows that name none. literal: texts are no
    patterns. An error of minidist has one line.
    """

    @pytest.mark.parametrize("row", rows, ids=lambda row: str(row[-1]))
    def test(row: tuple[Any, ...]) -> None:
        given, *own, says = row
        with pytest.raises(own[0] if own else error) as caught:
            call(**given) if isinstance(given, dict) else call(given)
        for text in [says] if isinstance(says, str) else says:
            assert re.search(re.escape(text) if literal else text, str(caught.value)), caught.value
        assert isinstance(caught.value, AssertionError) or "\n" not in str(caught.value)

    return test


Kind = type[Exception] | tuple[type[Exception], ...]


def error_of(kind: Kind, call: Callable[..., object], *given: Any) -> str:
    """The text of the error in which a call ends; a failure where it ends in none of this kind."""
    with pytest.raises(kind) as caught:
        call(*given)
    return str(caught.value)


def refused_on_ranks(
    cluster: Cluster, kind: Kind, says: str, call: Callable[..., object], *given: Any
) -> None:
    """Fail unless a call ends on all ranks in an error of this kind with one text, which `says` matches."""
    (told,) = {*cluster.run(error_of, kind, call, *given)}
    assert re.search(says, told), told
