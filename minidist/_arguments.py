"""Checks of arguments that many functions take: whole numbers and numbers, of which a bool is neither."""

from __future__ import annotations

from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer. True and False are not, though Python counts them among the integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an integer or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Refuse a `value` that is no integer, or less than `least`.

    Raises:
        TypeError: "rounds is 2.5 (float); give an integer".
        ValueError: "rounds is 0; give at least 1".
    """
    if not is_whole(value):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); give an integer")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; give at least {least}")
