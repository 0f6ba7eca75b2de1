"""Check arguments that must be integers or numbers. A bool is neither, although Python calls it an int."""

from __future__ import annotations

from typing import TypeGuard

LONGEST_TIMEOUT = 1e6
"""Seconds. Beyond this the clocks of the libraries below soon overflow."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an integer or a float, and not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int | None = None, hint: str = "") -> None:
    """Refuse a `value` that is not an integer, or is less than `least`; `hint` ends the message.

    Raises TypeError ("rounds is 2.5 (float); give an integer") or ValueError ("rounds is 0; give at least
    1").
    """
    if not is_whole(value):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); give an integer{hint}")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; give at least {least}{hint}")


def check_seconds(name: str, value: object, hint: str = "") -> float:
    """Return a time limit as a float; refuse a `value` that is none. `hint` ends the message."""
    if not is_number(value):
        raise TypeError(f"{name} is {value!r}; give a number of seconds")
    if not 0 < value <= LONGEST_TIMEOUT:
        raise ValueError(f"{name} is {value}; give seconds above 0 and up to {LONGEST_TIMEOUT:.0f}{hint}")
    return float(value)
