"""Checks of arguments: what is an integer, what is a number, and what the errors say."""

from __future__ import annotations

import re

import pytest

from minidist._arguments import check_whole, is_number, is_whole


@pytest.mark.parametrize(
    ("value", "whole", "number"),
    [(0, True, True), (-3, True, True), (2.5, False, True), (True, False, False), ("1", False, False)],
)
def test_a_bool_is_neither_an_integer_nor_a_number(value: object, whole: bool, number: bool) -> None:
    assert (is_whole(value), is_number(value)) == (whole, number)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (True, TypeError, "rounds is True (bool); give an integer, or None"),
        (2.5, TypeError, "rounds is 2.5 (float); give an integer, or None"),
        (0, ValueError, "rounds is 0; give at least 1, or None"),
    ],
)
def test_errors_name_the_value_and_the_remedy(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check_whole("rounds", value, 1, ", or None")


def test_integers_from_the_least_on_pass() -> None:
    check_whole("rounds", 1, 1)
    check_whole("offset", -5)
